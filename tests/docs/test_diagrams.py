"""The committed pictures are what docs/diagrams.py draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = runpy.run_path(str(DOCS / "diagrams.py"))["DRAWINGS"]


@pytest.mark.parametrize("name", DRAWINGS)
def test_picture_is_what_the_script_draws(name: str) -> None:
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == DRAWINGS[name]().svg()
