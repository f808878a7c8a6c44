"""The tables on the pages are what docs/tables.py writes: the numbers of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from patchloom.models.registry import entries

DOCS = Path(__file__).parents[2] / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in sorted(DOCS.glob("*.md"))])
def test_page_is_what_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLES["rewritten"](text) == text, "run: python docs/tables.py"


def test_every_listed_model_is_on_a_family_page() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
    overview = pages.pop("models.md")
    for entry in entries():
        name = f"| `{entry.config.name}` |"
        assert name in overview
        assert any(name in text for text in pages.values()), f"{entry.config.name} is on no family page"
