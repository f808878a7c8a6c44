"""Charts and heat maps of reports."""

from __future__ import annotations

import numpy as np

from patchloom.svg import MOST_CLASSES, heat_map, line_chart, most_confused, ticks


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert ticks(0.013, 0.98, 5) == [0, 0.5, 1]
    assert ticks(4.606, 4.673, 5) == [4.6, 4.62, 4.64, 4.66, 4.68]
    assert ticks(1, 300, 6) == [0, 100, 200, 300]


def test_values_that_are_not_finite_are_left_out() -> None:
    chart = line_chart("loss", {"training": [(1, 2.0), (2, float("nan")), (3, float("inf"))], "none": []})
    assert chart.count("<circle") == 1
    assert "nan" not in chart
    assert line_chart("loss", {"training": [(1, float("nan"))]}) == ""


def test_of_many_classes_those_with_most_errors_are_shown() -> None:
    table = np.eye(300, dtype=int) * 5
    table[7, 250] = 3
    shown = most_confused(table)
    assert len(shown) == MOST_CLASSES
    assert {7, 250} <= set(shown)
    assert list(shown) == sorted(shown)
    drawn = heat_map(table[np.ix_(shown, shown)], [f"<{i}>" for i in shown], table.sum(axis=1)[shown])
    assert "&lt;7&gt; predicted as &lt;250&gt;: 3 of 8" in drawn
