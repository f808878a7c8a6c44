"""The built site as a reader has it: opened from disk, in a real browser, with every command and public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.cli.main import _parser

ROOT = Path(__file__).parents[2]
WIDE = """[...document.querySelectorAll("article *")].filter(
    one => one.clientWidth && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible"
).map(one => one.tagName + " " + one.textContent.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1280 pixels without network; errors and requests to anywhere but the disk are failures."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    shown, wrong = context.new_page(), []
    ours = ("file:", "data:", "about:")
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(ours) else None)
    yield shown
    context.close()
    assert not wrong


def test_no_page_scrolls_sideways_at_1280_pixels(site: Path, page: Any) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    wrong = {}
    for path in pages:
        page.goto(path.as_uri())
        found = page.evaluate(WIDE)
        if found or page.evaluate("document.documentElement.scrollWidth") > 1280:
            wrong[path.name] = found
    assert not wrong


@pytest.mark.parametrize("start", ["index.html", "results/finetuning.html"])
def test_search_works_from_disk(start: str, site: Path, page: Any) -> None:
    page.goto((site / start).as_uri())
    page.click(".md-search__input")
    page.keyboard.type("capture_attention")
    page.wait_for_selector(".md-search-result__item")
    page.locator(".md-search-result__item a").first.click()
    page.wait_for_url(re.compile("file:.*html"))
    assert "capture_attention" in page.locator("article").inner_text()


def test_the_reference_has_every_public_name_with_its_docstring(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in patchloom.__all__:
        heading = re.search(rf'<h3 id="patchloom\.{name}".*?</h3>(.*?)(?=<h[23] |</article>)', text, re.S)
        assert heading, f"docs/api.md has no {name}"
        assert re.search(r"<p>.{20}", heading[1], re.S), f"{name} has no docstring"


def commands() -> list[str]:
    (group,) = [action for action in _parser()._actions if hasattr(action, "choices") and action.choices]
    return list(group.choices)


def test_the_home_page_lists_every_command() -> None:
    section = (ROOT / "docs" / "index.md").read_text().split("## Commands")[1].split("\n## ")[0]
    assert [name for name in commands() if f"`patchloom {name}" not in section] == []


def test_installation_lists_every_extra() -> None:
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in re.findall(r"^(\w+) = \[", extras, re.M) if f"`{name}`" not in page] == []
    for path in (ROOT / "README.md", ROOT / "docs" / "install.md"):
        assert "https://download.pytorch.org/whl/cpu" in path.read_text()
