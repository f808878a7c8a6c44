"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import opened, until, upload

from serving import Server, picture, save_models, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(*save_models(tmp_path_factory.mktemp("models")).values()) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    yield from opened(browser, server)


def wait_for_map(page: Any, panes: int = 1) -> None:
    until(page, f"document.querySelectorAll('.pane:not(.working) .caption:not(:empty)').length === {panes}")


def overlay(page: Any, pane: int = 0) -> str:
    """The pixels of the map that lies over the image."""
    return page.evaluate(f"document.querySelectorAll('.overlay')[{pane}].toDataURL()")


def changed(page: Any, before: str) -> str:
    limit = time.monotonic() + 30
    while (now := overlay(page)) == before:
        assert time.monotonic() < limit, "the map stayed as it was"
        time.sleep(0.05)
    return now


def test_an_upload_is_classified_and_explained(page: Any, server: Server) -> None:
    data = picture(5)
    upload(page, data)
    wait_for_map(page)
    want = server.post("/api/predict", data).json["predictions"]
    rows = page.locator(".class-row")
    assert rows.count() == len(want) == 5
    assert rows.locator(".name").all_inner_texts() == [row["class"] for row in want]
    share = page.evaluate("(() => { const i = document.querySelector('.bar i'); return parseFloat(i.style.width); })()")
    assert share == pytest.approx(100 * want[0]["probability"], abs=0.1)
    page.wait_for_selector(".gauge")
    assert page.locator(".verdict b").inner_text() in ("Yes.", "Partly.", "No.")
    assert "Answered in" in page.locator(".timings").inner_text()
    assert want[0]["class"] in page.locator("#live").inner_text()


def test_a_click_on_a_class_shows_its_own_map_and_another_click_takes_it_back(page: Any) -> None:
    upload(page, picture(6))
    wait_for_map(page)
    first = overlay(page)
    second = page.locator(".class-row").nth(1)
    name = second.locator(".name").inner_text()
    second.click()
    own = changed(page, first)
    assert page.locator(".caption").inner_text() == f"Grad-CAM: {name}"
    assert second.get_attribute("aria-pressed") == "true"
    second.click()
    assert changed(page, own) == first


def test_another_model_gives_other_classes_and_one_map_a_class(page: Any, server: Server) -> None:
    data = picture(8)
    upload(page, data)
    wait_for_map(page)
    page.select_option(".model", "patchconvnet")
    wait_for_map(page)
    want = server.post("/api/predict?model=patchconvnet", data).json["predictions"]
    assert page.locator(".class-row .name").all_inner_texts() == [row["class"] for row in want]
    before = overlay(page)
    page.locator(".class-row").nth(2).click()
    changed(page, before)
    assert page.locator(".caption").inner_text() == f"Class map: {want[2]['class']}"
    page.wait_for_selector(".gauge")
    assert f"“{want[2]['class']}”" in page.locator(".verdict").inner_text()


def test_two_models_side_by_side(page: Any) -> None:
    upload(page, picture(9))
    wait_for_map(page)
    page.click("#compare")
    wait_for_map(page, 2)
    assert page.locator(".model").evaluate_all("all => all.map(one => one.value)") == ["cait", "patchconvnet"]
    left, right = (page.locator(".pane").nth(i).bounding_box() for i in range(2))
    assert left["y"] == right["y"]
    assert right["x"] >= left["x"] + left["width"]
    assert overlay(page, 0) != overlay(page, 1)
    page.click("#compare")
    assert page.locator(".pane").count() == 1


def test_a_bad_file_is_answered_in_a_sentence_and_a_good_one_after_it_works(page: Any) -> None:
    upload(page, b"this is no image", "notes.txt")
    page.wait_for_selector("#problem:not(:empty)")
    assert "not an image" in page.locator("#problem").inner_text()
    assert page.locator(".pane").count() == 0
    upload(page, picture()[:300], "cut.png")
    until(page, "document.querySelector('#problem').textContent.includes('damaged')")
    upload(page, picture())
    wait_for_map(page)
    assert page.locator("#problem").inner_text() == ""


def test_heads_on_hover_and_the_slider(page: Any) -> None:
    page.click(".sample >> nth=0")
    wait_for_map(page)
    first = overlay(page)
    page.hover(".head >> nth=1")
    changed(page, first)
    assert "head 2" in page.locator(".caption").inner_text()
    page.hover("#headline")
    assert changed(page, overlay(page) if overlay(page) != first else "") == first
    page.fill(".opacity", "10")
    assert page.evaluate("document.querySelector('.overlay').style.opacity") == "0.1"


def test_pasting_and_dropping(page: Any) -> None:
    for kind, make in {
        "paste": "new ClipboardEvent('paste', {clipboardData: data, bubbles: true})",
        "drop": "new DragEvent('drop', {dataTransfer: data, bubbles: true})",
    }.items():
        page.evaluate(
            f"""async kind => {{
                const blob = await (await fetch('api/samples/flower')).blob();
                const data = new DataTransfer();
                data.items.add(new File([blob], kind + '.jpg', {{type: 'image/jpeg'}}));
                document.body.dispatchEvent({make});
            }}""",
            kind,
        )
        until(page, f"document.querySelector('#headline').textContent === '{kind}.jpg'")
        wait_for_map(page)


def test_all_of_it_with_the_keyboard_alone(page: Any) -> None:
    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                seen = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert seen == "solid", f"{selector} does not show that it has the focus"
                return
        raise AssertionError(f"{selector} is not reached by Tab")

    tab_to("#choose")
    tab_to(".sample")
    page.keyboard.press("Enter")
    wait_for_map(page)
    first = overlay(page)
    tab_to(".model")
    tab_to(".chips button[aria-pressed=false]")
    page.keyboard.press("Space")
    second = changed(page, first)
    tab_to(".opacity")
    before = page.input_value(".opacity")
    page.keyboard.press("ArrowLeft")
    assert page.input_value(".opacity") != before
    tab_to(".class-row")
    tab_to(".class-row")
    page.keyboard.press("Enter")
    third = changed(page, second)
    tab_to(".head")
    fourth = changed(page, third)
    page.keyboard.press("ArrowRight")
    fifth = changed(page, fourth)
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert overlay(page) == fifth


def test_a_phone(browser: Any, server: Server) -> None:
    for page in opened(browser, server, viewport={"width": 360, "height": 740}, has_touch=True):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click(".sample >> nth=0")
        wait_for_map(page)
        page.wait_for_selector(".gauge")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#compare")
        wait_for_map(page, 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        sizes = page.locator("button:visible").evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
        assert min(sizes) >= 32


def test_dark_and_light(browser: Any, server: Server) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        for page in opened(browser, server, color_scheme=scheme):
            grounds[scheme] = page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
            )
            ink = page.evaluate("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)")
            assert abs(sum(ink) - sum(grounds[scheme])) > 500
    assert sum(grounds["dark"]) < 120 < 600 < sum(grounds["light"])


def test_a_map_in_the_making_says_so_and_is_given_up_for_another(page: Any) -> None:
    held: list[Any] = []
    given_up: list[str] = []
    page.on("requestfailed", lambda request: given_up.append(request.url))
    page.route("**/api/explain?*maps=occlusion*", lambda route: held.append(route))
    page.click(".sample >> nth=0")
    wait_for_map(page)
    page.click("text=Occlusion")
    page.wait_for_selector(".chips [data-map=occlusion][aria-busy=true]")
    assert page.locator(".caption").inner_text() == "Occlusion …"
    page.hover(".head >> nth=1")
    until(page, "document.querySelector('.caption').textContent.includes('head 2')")
    page.hover("#headline")
    until(page, "document.querySelector('.caption').textContent === 'Occlusion …'")
    page.click(".chips button >> nth=0")
    page.wait_for_selector(".gauge")
    assert page.locator("[aria-busy=true]").count() == 0
    assert len(held) == 1
    assert [url for url in given_up if "occlusion" in url]


def test_a_measurement_that_failed_can_be_tried_again(page: Any) -> None:
    def busy(route: Any) -> None:
        route.fulfill(status=503, json={"error": "The service is busy."})

    page.route("**/api/explain?*faithfulness=true*", busy)
    page.click(".sample >> nth=0")
    wait_for_map(page)
    page.wait_for_selector(".again")
    assert page.locator(".pane-problem").inner_text() == "The service is busy."
    page.unroute("**/api/explain?*faithfulness=true*")
    page.click(".again")
    page.wait_for_selector(".gauge")
    assert page.locator(".pane-problem").inner_text() == ""


def test_an_image_that_comes_before_the_models_waits_for_them(browser: Any, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    held: list[Any] = []
    page.route("**/api/models", lambda route: held.append(route))
    page.goto(server.url)
    upload(page, picture())
    until(page, "document.querySelector('#headline').textContent === 'photo.png'")
    assert page.locator("#problem").inner_text() == ""
    held[0].continue_()
    wait_for_map(page)
    context.close()


def test_the_token_is_asked_for(browser: Any, tmp_path: Path) -> None:
    model = save_models(tmp_path)["cait_nano"]
    with serving(model, "--token", "open sesame") as guarded:
        context = browser.new_context()
        page = context.new_page()
        page.goto(guarded.url)
        page.wait_for_selector("#ask[open]")
        page.keyboard.press("Escape")
        until(page, "document.querySelector('#problem').textContent.includes('token')")
        assert page.locator("#ask[open]").count() == 0
        upload(page, picture())
        page.fill("#token", "сезам, откройся")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#ask-problem').textContent.includes('ASCII')")
        page.fill("#token", "wrong token")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#ask-problem').textContent === 'That token is wrong.'")
        page.wait_for_selector("#ask[open]")
        page.fill("#token", "open sesame")
        page.click("#ask-done")
        page.wait_for_selector(".sample")
        wait_for_map(page)
        context.close()
