"""The neighbours on the page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import opened, until, upload
from photos import keyed, make_photos, save_model

import patchloom
from serving import Server, picture, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("search")
    table = make_photos(folder / "photos")
    model = save_model(folder / "pets.safetensors")
    patchloom.Index.build(model, table, folder / "index", labels=["breed", "species"])
    with serving(model, "--index", folder / "index") as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    yield from opened(browser, server)


def keys(page: Any) -> list[str]:
    return page.locator(".neighbour").evaluate_all("all => all.map(one => one.dataset.key)")


def wait_for(page: Any, results: list[dict[str, Any]]) -> None:
    """Until exactly these neighbours are shown, with their pictures."""
    want = "|".join(row["key"] for row in results)
    until(page, f"[...document.querySelectorAll('.neighbour')].map(one => one.dataset.key).join('|') === {want!r}")
    until(page, "[...document.querySelectorAll('.neighbour img')].every(image => image.naturalWidth > 1)")


def test_a_dropped_photo_shows_its_neighbours_and_a_click_makes_one_the_query(page: Any, server: Server) -> None:
    assert page.locator("#headline").inner_text() == "Drop an image to find similar ones"
    assert page.locator("#similar").is_hidden()
    data = picture(203)  # a picture of the index
    upload(page, data, "mine.png")
    plain = server.post("/api/search?k=24", data).json
    wait_for(page, plain["results"])
    assert keys(page)[0] == "pug/3.png"
    assert page.locator(".neighbour .labels").all_inner_texts() == [
        f"{row['labels']['breed']} · {row['labels']['species']}" for row in plain["results"]
    ]
    assert page.locator(".neighbour .score").first.inner_text() == "1.000"
    best = {column: next(iter(found)) for column, found in plain["knn"].items()}
    assert all(f"{column} {name}" in page.locator(".votes").inner_text() for column, name in best.items())

    page.click("text=Prefer the predicted species")
    coarse = server.post("/api/search?k=24&condition=coarse", data).json["results"]
    assert [row["key"] for row in coarse] != [row["key"] for row in plain["results"]]
    wait_for(page, coarse)
    assert page.locator(".condition").get_attribute("aria-pressed") == "true"
    page.click(".condition")
    wait_for(page, plain["results"])

    key = keys(page)[4]
    page.click(".neighbour >> nth=4")
    wait_for(page, server.ask("POST", keyed("/api/search/key?k=24", key)).json["results"])
    assert key not in keys(page)
    assert page.locator(".query-name").inner_text() == key
    until(page, "document.querySelector('.query-picture').src.startsWith('blob:')")
    page.click(".home")
    wait_for(page, plain["results"])
    assert page.locator(".query-name").inner_text() == "mine.png"
    assert page.locator(".home").is_hidden()


def test_another_photo_replaces_the_neighbours_and_a_bad_file_removes_them(page: Any, server: Server) -> None:
    for seed in (5, 6):
        upload(page, picture(seed))
        wait_for(page, server.post("/api/search?k=24", picture(seed)).json["results"])
    upload(page, b"this is no image", "notes.txt")
    until(page, "document.querySelector('#problem').textContent.includes('not an image')")
    assert page.locator("#similar").is_hidden()


def test_neighbours_with_the_keyboard_and_on_a_phone(browser: Any, server: Server) -> None:
    for page in opened(browser, server, viewport={"width": 360, "height": 740}, has_touch=True):
        upload(page, picture(8))
        wait_for(page, server.post("/api/search?k=24", picture(8)).json["results"])
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        key = keys(page)[1]
        page.locator(".neighbour").nth(1).focus()
        page.keyboard.press("Enter")
        wait_for(page, server.ask("POST", keyed("/api/search/key?k=24", key)).json["results"])
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_pictures_and_neighbours_come_with_the_token(browser: Any, tmp_path: Path) -> None:
    table, model = make_photos(tmp_path / "photos"), save_model(tmp_path / "pets.safetensors")
    patchloom.Index.build(model, table, tmp_path / "index", labels="species")
    with serving(model, "--index", tmp_path / "index", "--token", "open sesame") as guarded:
        guarded.headers["Authorization"] = "Bearer open sesame"
        page = browser.new_context().new_page()
        page.goto(guarded.url)
        page.wait_for_selector("#ask[open]")
        page.fill("#token", "open sesame")
        page.click("#ask-done")
        page.wait_for_selector(".sample")
        upload(page, picture(9))
        wait_for(page, guarded.post("/api/search?k=24", picture(9)).json["results"])
        page.context.close()


def test_a_model_without_maps_shows_its_classes_and_neighbours(browser: Any, tmp_path: Path) -> None:
    table, path = make_photos(tmp_path / "photos"), tmp_path / "foreign.safetensors"
    model = patchloom.create_model("timm:test_resnet", num_classes=2, img_size=32)
    model.class_names = ("cat", "dog")
    patchloom.save(model, path)
    patchloom.Index.build(path, table, tmp_path / "index", labels="species")
    with serving(path, "--index", tmp_path / "index") as server:
        for page in opened(browser, server):
            upload(page, picture(9))
            wait_for(page, server.post("/api/search?k=24", picture(9)).json["results"])
            until(page, "document.querySelectorAll('.class-row').length === 2")
            until(page, "!document.querySelector('.pane.working')")
            assert page.locator(".pane-problem").inner_text() == ""
            assert page.locator(".trust").is_hidden()
