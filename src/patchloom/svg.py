"""Charts of the report as SVG text: curves with axes, and a confusion matrix as a heat map.

Colours are the variables of report.css, so that a chart follows dark mode; report.js shows values on hover.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 260, 56, 12, 12, 40
COLOURS = ("var(--mark)", "var(--bad)", "var(--third)")
MOST_CLASSES = 100  # that a heat map of a page's width can label
NUMBERED = 20  # up to here, cells are large enough for their counts
LONGEST_NAME = 18

Points = Sequence[tuple[float, float]]


def line_chart(title: str, lines: Mapping[str, Points], x_name: str = "epoch") -> str:
    """Curves of (x, y) points over one x axis; values that are not finite are left out. Empty without a point."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return ""
    across = ticks(*_ends([x for points in finite.values() for x, _ in points]), 6)
    if all(float(x).is_integer() for points in finite.values() for x, _ in points):
        across = [x for x in across if x.is_integer()]  # there is no epoch 1.5
    up = ticks(*_ends([y for points in finite.values() for _, y in points]), 5)
    place = _Place(finite, up)
    drawn = [_curve(points, COLOURS[i % len(COLOURS)], place) for i, points in enumerate(finite.values())]
    stops = _stops(finite, place, x_name)
    data = escape(json.dumps(stops))
    return (
        f"<figure class=chart><figcaption><b>{escape(title)}</b> {_legend(list(finite))}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" data-stops="{data}">'
        f"{_axes(place, across, up, x_name)}{''.join(drawn)}"
        f'<path class=cursor d="M0 {TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
        f"<p class=values>{escape(stops[-1][1])}</p></figure>"
    )


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round values (1, 2 or 5 times a power of ten) that enclose `low` and `high`."""
    raw = (high - low) / max(most - 1, 1)
    # The power of ten below the raw step; the step is that times 1, 2, 5 or 10.
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    # 1e-9: an end that lies on a tick but for rounding needs no further tick.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Twelve digits: 3 * 0.1 would print as 0.30000000000000004.
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value; half a unit below and above if all are equal."""
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-12 * max(abs(low), abs(high)) else (low - 0.5, high + 0.5)


class _Place:
    """From values to pixels. The x axis ends at the data, the y axis at its ticks."""

    def __init__(self, lines: Mapping[str, Points], up: Sequence[float]) -> None:
        self.left, self.right = _ends([x for points in lines.values() for x, _ in points])
        self.low, self.high = up[0], up[-1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - BOTTOM - TOP)


def _axes(place: _Place, across: Sequence[float], up: Sequence[float], x_name: str) -> str:
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    rows = "".join(
        f'<path class=grid d="M{LEFT} {place.y(value):.1f}H{end}"/>'
        f'<text x="{LEFT - 6}" y="{place.y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        for value in up
    )
    columns = "".join(
        f'<path class=axis d="M{place.x(value):.1f} {bottom}v4"/>'
        f'<text x="{place.x(value):.1f}" y="{bottom + 17}" text-anchor="middle">{value:.6g}</text>'
        for value in across
        if place.left <= value <= place.right
    )
    name = f'<text x="{(LEFT + end) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>'
    return f'{rows}{columns}<path class=axis d="M{LEFT} {TOP}V{bottom}H{end}"/>{name}'


def _curve(points: Points, colour: str, place: _Place) -> str:
    """A polyline, with dots where there are few points: one alone would not be seen."""
    line = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in points)
    dots = points if len(points) <= 30 else ()
    marks = "".join(f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="2.2"/>' for x, y in dots)
    return f'<polyline points="{line}" style="stroke:{colour}"/><g style="fill:{colour}">{marks}</g>'


def _legend(names: Sequence[str]) -> str:
    return " ".join(
        f'<span class=key style="color:{COLOURS[i % len(COLOURS)]}">{escape(name)}</span>'
        for i, name in enumerate(names)
    )


def _stops(lines: Mapping[str, Points], place: _Place, x_name: str) -> list[tuple[float, str]]:
    """What hovering shows: for every x its pixel and the values there."""
    by_x: dict[float, list[str]] = {}
    for name, points in lines.items():
        for x, y in points:
            by_x.setdefault(x, []).append(f"{name} {y:.4g}".strip())
    return [(round(place.x(x), 1), f"{x_name} {x:g}: {', '.join(values)}") for x, values in sorted(by_x.items())]


def most_confused(table: np.ndarray) -> np.ndarray:
    """The classes that a heat map has room for, in their order: those with most errors as label or prediction."""
    # Errors only: a class that is often right says little.
    wrong = table - np.diag(np.diag(table))
    return np.sort(np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")[:MOST_CLASSES])


def heat_map(table: np.ndarray, names: Sequence[str], totals: np.ndarray) -> str:
    """A (classes, classes) confusion matrix, rows being labels; the colour is the share of a label's `totals`."""
    side = 36 if len(names) <= NUMBERED else 16
    short = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    margin = 36 + 8 * max(map(len, short))
    size = margin + side * len(names) + 1
    cells = "".join(_cell(i, j, int(table[i, j]), int(totals[i]), names, (margin, side)) for i, j in np.argwhere(table))
    labels = "".join(_labels(i, short[i], names[i], (margin, side)) for i in range(len(names)))
    end = margin + side * len(names)
    return (
        f'<svg class=heat viewBox="0 0 {size} {size}" width="{size}" role="img" aria-label="confusion matrix">'
        f'<text x="{(margin + end) / 2}" y="14" text-anchor="middle">prediction</text>'
        f'<text transform="translate(14 {(margin + end) / 2}) rotate(-90)" text-anchor="middle">label</text>'
        f'{labels}<path class=axis d="M{margin} {margin}H{end}V{end}H{margin}Z"/>{cells}</svg>'
    )


def _labels(i: int, short: str, name: str, sizes: tuple[int, int]) -> str:
    """The name of class i beside its row and above its column."""
    margin, side = sizes
    middle, text = margin + side * (i + 0.5) + 5, f"<title>{escape(name)}</title>{escape(short)}</text>"
    above = f'<text transform="translate({middle} {margin - 6}) rotate(-90)">{text}'
    return f'<text x="{margin - 6}" y="{middle}" text-anchor="end">{text}{above}'


def _cell(i: int, j: int, count: int, total: int, names: Sequence[str], sizes: tuple[int, int]) -> str:
    margin, side = sizes
    x, y, share = margin + side * j, margin + side * i, count / max(total, 1)
    text = f"{names[i]} predicted as {names[j]}: {count} of {total}"
    colour = "var(--mark)" if i == j else "var(--bad)"
    opacity = 0.15 + 0.85 * share  # a single error among thousands is still seen
    number = ""
    if len(names) <= NUMBERED:
        ink = "var(--paper)" if opacity > 0.55 else "var(--ink)"
        number = (
            f'<text x="{x + side / 2}" y="{y + side / 2 + 5}" text-anchor="middle" style="fill:{ink}">{count}</text>'
        )
    return (
        f'<g><title>{escape(text)}</title><rect x="{x}" y="{y}" width="{side}" height="{side}" '
        f'style="fill:{colour}" fill-opacity="{opacity:.2f}"/>{number}</g>'
    )
