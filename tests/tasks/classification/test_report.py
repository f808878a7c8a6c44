"""report.html in a real browser: everything fits, values show on hover, dark mode, nothing from the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binomtest

import patchloom
from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.data.splits import split_source
from patchloom.tasks.classification.metrics import Scores
from patchloom.tasks.classification.report import CHARTS, classification_sections
from patchloom.training.report import write_report
from patchloom.training.run import Run

CLASSES, EPOCHS = 100, 3
LONG = "a_file_name_as_long_as_cameras_and_messengers_make_them_without_one_space"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on 100 classes, some with long names, and files with long names."""
    folder = tmp_path_factory.mktemp("hundred")
    noise = np.random.default_rng(0)
    for number in range(CLASSES):
        name = f"class {number:03d}" if number % 9 else f"{LONG}_{number}"
        for split in ("train", "val"):
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{LONG}{i}.png")
    return patchloom.train(
        folder, model="deit_nano", recipe="deit@small", out=folder / "run", console=Console(quiet=True), workers=0,
        model_options={"depth": 1, "dim": 24, "heads": 2}, resolution=16, epochs=EPOCHS,
    )  # fmt: skip


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, run: Run) -> Iterator[Any]:
    """The report at 1280 pixels; it must neither raise an error nor ask for anything."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 900}, offline=True)
    shown, wrong = context.new_page(), []
    report = (run.folder / "report.html").as_uri()
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((report, "data:")) else None)
    shown.goto(report)
    shown.scheme = request.param
    yield shown
    context.close()
    assert not wrong


def overflowing(page: Any) -> list[str]:
    """Elements that reach beyond the window, or whose text reaches beyond themselves."""
    return page.evaluate(
        """[...document.body.querySelectorAll("*")].filter(one => {
            const box = one.getBoundingClientRect();
            const wide = one instanceof HTMLElement && one.scrollWidth > one.clientWidth + 1;
            return box.right > innerWidth + 1 || (one.clientWidth && wide);
        }).map(one => one.tagName + " " + one.textContent.slice(0, 60))"""
    )


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_scrolls_sideways_and_captions_wrap(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert overflowing(page) == []
    assert page.locator("figcaption", has_text=LONG).count() > 0


def test_the_heat_map_shows_every_pair_of_100_classes(page: Any, run: Run) -> None:
    assert page.locator("svg.heat").bounding_box()["width"] <= 1024
    titles = page.locator("svg.heat g title").all_text_contents()
    assert sum(int(re.search(r": (\d+) of 2$", title)[1]) for title in titles) == 2 * CLASSES
    labels = page.locator("svg.heat > text > title").all_text_contents()
    names = patchloom.load(run.folder).class_names
    assert sorted(labels) == sorted([*names, *names])
    heights = page.locator("svg.heat > text").evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
    assert min(heights) > 6  # pixels: small, but legible


def test_curves_have_axes_and_show_values_on_hover(page: Any, run: Run) -> None:
    records = [row for row in run.records() if row.get("event") == "epoch"]
    chart = page.locator(".chart").first
    numbers = [float(text) for text in chart.locator("svg text").all_text_contents() if text != "epoch"]
    assert len(numbers) >= EPOCHS + 3
    box = chart.locator("svg").bounding_box()
    for row, x in ((records[0], 0.12), (records[-1], 0.97)):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + box["height"] / 2)
        shown = chart.locator(".values").inner_text()
        assert shown == f"epoch {row['epoch']}: training {row['train_loss']:.4g}, held out {row['loss']:.4g}"
        assert chart.locator(".cursor").get_attribute("visibility") == "visible"
    page.mouse.move(0, 0)
    assert chart.locator(".cursor").get_attribute("visibility") == "hidden"


def test_dark_mode_is_dark(page: Any) -> None:
    paper, ink = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    paper, ink = (sum(map(int, re.findall(r"\d+", colour))) for colour in (paper, ink))
    assert (paper < 150 < 600 < ink) if page.scheme == "dark" else (ink < 150 < 600 < paper)


def test_the_interval_of_the_scores_is_shown_with_the_number_of_images(run: Run) -> None:
    """Not that of the log, whose last record may be of other weights than the exported ones."""
    log, before = run.folder / "log.jsonl", (run.folder / "log.jsonl").read_text()
    *others, last = before.splitlines()
    log.write_text("\n".join([*others, json.dumps({**json.loads(last), "top1_interval": [0.8125, 0.9437]})]) + "\n")
    source = open_source(run.settings["data"])
    items = split_source(source).held_out
    labels = np.array([item.label for item in items])
    rank = (np.arange(200) < 20).astype(int)
    predicted = (labels + rank) % CLASSES
    scores = Scores(labels, predicted, np.ones(200), rank, np.zeros(200), source.class_names, ("",) * 200)
    interval = binomtest(180, 200).proportion_ci(method="wilson")
    whole = (run.folder / "report.html").read_bytes()
    try:
        headline, sections = classification_sections(run, source, items, scores, patchloom.load(run.folder))
        write_report(run, "a title", headline, sections, CHARTS)
        text = (run.folder / "report.html").read_text()
    finally:
        log.write_text(before)
        (run.folder / "report.html").write_bytes(whole)
    assert f"top-1 on 200 held-out images; 95 % interval {interval.low:.1%} to {interval.high:.1%}" in text
