"""report.html: curves of the log, sections of the task, settings with their sources; nothing from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from patchloom.training.export import write_plain_report
from patchloom.training.report import write_report
from patchloom.training.run import Run


def run(folder: Path, **values: Any) -> Run:
    made = Run(folder, {"task": "own", "lr": 0.1, "note": "<b>", "sources": {"lr": "Table <2>"}})
    for epoch in (1, 2, 3):
        made.log({"event": "epoch", "epoch": epoch, "step": epoch, "lr": 0.1, "train_loss": 1.0 / epoch, **values})
    return made


def charts(folder: Path) -> list[str]:
    return re.findall(r'role="img" aria-label="([^"]*)"', (folder / "report.html").read_text())


def test_a_report_has_sections_curves_and_settings_with_their_sources(tmp_path: Path) -> None:
    write_report(run(tmp_path), "A & B", "<h1>Headline</h1>", [("Errors <1>", "<p id=mine>text</p>")])
    page = (tmp_path / "report.html").read_text()
    assert charts(tmp_path) == ["loss", "learning rate"]
    for part in ("<title>A &amp; B", "<h1>Headline</h1>", "<h2>Errors &lt;1&gt;</h2><p id=mine>text</p>"):
        assert part in page
    assert "<td>lr<td>0.1<td class=soft>Table &lt;2&gt;" in page
    assert "<td>note<td>&lt;b&gt;" in page
    assert not re.search(r'(src|href)="?https?:', page)


def test_several_losses_have_a_chart_with_a_curve_for_each(tmp_path: Path) -> None:
    write_report(run(tmp_path, losses={"a.1": 0.5, "b": 0.25}), "t", "", [])
    assert charts(tmp_path)[-1] == "losses"
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"a\.1 0\.5", page)


def test_a_metric_whose_name_has_a_dot_has_its_curve(tmp_path: Path) -> None:
    """AP at an overlap, beside a metric that is called like the part before the dot."""
    write_plain_report(run(tmp_path, **{"AP": 0.5, "AP.75": 0.25, "losses": {"a": 1.0}}))
    assert charts(tmp_path)[-2:] == ["AP", "AP.75"]


def test_a_run_without_an_evaluation_says_so(tmp_path: Path) -> None:
    write_plain_report(Run(tmp_path, {"task": "own"}))
    assert "No epoch was evaluated." in (tmp_path / "report.html").read_text()
