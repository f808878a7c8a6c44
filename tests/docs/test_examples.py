"""Every python block of the documentation runs, a page at a time, in the order in which it is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patchloom.models import registry

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line on which each block's code starts, and the code."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES if blocks(page)])
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))  # what an example registers ends with it
    namespace: dict[str, object] = {"__name__": "example"}
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)  # empty lines: errors name the page's own line


def test_every_family_page_has_an_example() -> None:
    families = ("deit", "deit3", "parallel", "cait", "resmlp", "patchconvnet")
    assert all(blocks(ROOT / "docs" / f"{name}.md") for name in families)
