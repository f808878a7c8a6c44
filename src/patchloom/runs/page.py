"""Runs on one page without network: their curves over one another, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from patchloom.pages import html_page
from patchloom.runs.listing import KEYS, RunInfo, changes_text, write_file
from patchloom.tasks.registry import find_task

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 280, 56, 34, 24
_TICKS = 4
_NUMBERS = ("epochs", "last", "best", "seconds")

Series = list[tuple[str, list[tuple[int, float]]]]  # colour, and (epoch, value)


def write_page(runs: Sequence[RunInfo], path: Path) -> None:
    """An HTML file with a chart per metric, a line per run, and all runs in a table."""
    # The golden ratio (0.618) spreads hues evenly for any number of runs.
    colours = [f"hsl({round(360 * i * 0.618) % 360} 65% 45%)" for i in range(len(runs))]  # neighbours differ
    charts = []
    names = dict.fromkeys(name for run in runs if run.settings for name in find_task(run.settings["task"]).curves)
    for name in names:
        lines = [(colour, _finite(run.curve(name))) for colour, run in zip(colours, runs, strict=True)]
        if any(points for _, points in lines):
            charts.append(_chart(name, lines, [str(run.folder) for run in runs]))
    title, table = f"{len(runs)} runs", _table(runs, colours)
    body = f"<h1>{title}</h1><div class=curves>{''.join(charts)}</div><div class=wide>{table}</div>"
    write_file(path, html_page(title, body))


def _finite(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [point for point in points if math.isfinite(point[1])]


def _chart(title: str, lines: Series, names: list[str]) -> str:
    """One line per run; its name appears on hover."""
    values = [value for _, points in lines for _, value in points]
    low, high = min(values), max(values)
    # A constant curve would divide by zero.
    high += (high == low) * (abs(high) or 1.0)
    last = max(epoch for _, points in lines for epoch, _ in points)

    def x(epoch: float) -> float:
        return _LEFT + (epoch - 1) / max(last - 1, 1) * (_WIDTH - _LEFT - 10)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    drawn = []
    for (colour, points), name in zip(lines, names, strict=True):
        path = " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points)
        dots = "".join(
            f'<circle cx="{x(epoch):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}">'
            f"<title>{escape(name)}, epoch {epoch}: {value:.4g}</title></circle>"
            for epoch, value in points
        )
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dots}')
    marks = [low + i * (high - low) / _TICKS for i in range(_TICKS + 1)]
    ticks = "".join(
        f'<path d="M{_LEFT} {y(mark):.1f}H{_WIDTH - 10}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 5}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.3g}</text>'
        for mark in marks
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{_LEFT}" y="14">{escape(title)}</text>{ticks}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 14}">epoch 1</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 14}" text-anchor="end">epoch {last}</text>{"".join(drawn)}</svg>'
    )


def _table(runs: Sequence[RunInfo], colours: Sequence[str]) -> str:
    head = "".join(f"<th{' class=n' if key in _NUMBERS else ''}>{key}" for key in KEYS)
    rows = []
    for run, colour in zip(runs, colours, strict=True):
        values = {**run.row(), "changes": changes_text(run.changes)}
        cells = "".join(_cell(key, value) for key, value in values.items() if key != "run")
        rows.append(f'<tr><td class=words><span style="color:{colour}">&#9632;</span> {escape(str(run.folder))}{cells}')
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(key: str, value: object) -> str:
    """Only `changes` may break inside a word; a run's name, the first column, may not either."""
    kind = "n" if key in _NUMBERS else "changes" if key == "changes" else "words"
    return f"<td class={kind}>{escape(_text(value))}"


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
