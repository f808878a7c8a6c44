"""The figures on the pages of results are those that the benchmarks kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = {
    "inference": "inference",
    "inference-kept-memory": "inference",
    "reduced": "inference",
    "steps": "steps",
    "loading": "loading",
    "choices": "choices",
    "parallel": "parallel",
}


@pytest.mark.parametrize(("record", "page"), KEPT.items())
def test_every_ratio_kept_is_on_its_page(record: str, page: str) -> None:
    rows = json.loads((ROOT / "benchmarks" / "baselines" / f"{record}.json").read_text())["rows"]
    lines = (ROOT / "docs" / "results" / f"{page}.md").read_text().splitlines()
    for row in rows:
        if row["model"] == row["peer"]:
            continue
        figures = [f"| {row['ratio']:.2f} |"]
        if not row["model"].startswith("pairs"):  # whose table has no room for quartiles
            figures += [f"| {row['low']:.2f} to {row['high']:.2f} |"]
        assert any(all(figure in line for figure in figures) for line in lines), f"{row['model']}: {figures}"
