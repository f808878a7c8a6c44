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


def test_the_costs_of_search_are_those_kept() -> None:
    page = (ROOT / "docs" / "results" / "search.md").read_text()
    ranking, memory = (
        json.loads((ROOT / "benchmarks" / "baselines" / f"{name}.json").read_text())["rows"]
        for name in ("ranking", "grafit_memory")
    )
    for row in ranking:
        assert f"| {row['seconds']:.2f} | {row['ratio']:.2f} | {row['gigabytes']:.2f} | {row['map']:.6f} |" in page
    own = next(row["ours"]["seconds"] for row in memory if row["model"] == "ours")
    for found in (row.get("theirs", row["ours"]) for row in memory):
        assert f"| {found['seconds']:.2f} | {found['seconds'] / own:.2f} | {found['memory_mb']:,.0f} |" in page
