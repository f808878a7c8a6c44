"""Pictures of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchloom.models.complexity import complexity
from patchloom.tasks.figures import new_figure, save_figure

_LABELS = {"ours": "patchloom, fused", "theirs": "peer"}
_MEASURES = (("throughput", "images a second"), ("memory_mb", "memory of a forward, MB"))


def draw_scaling(rows: Sequence[dict[str, Any]], along: str, path: Path) -> None:
    """Throughput and memory along the image size or the depth, a line a model and side."""
    figure = new_figure(9, 3.6)
    for axis, (measure, label) in zip(figure.subplots(1, 2), _MEASURES, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            for who, style in (("ours", "o-"), ("theirs", "s--")):
                points = sorted((row[along], row[who][measure]) for row in rows if row["model"] == model and who in row)
                if points and all(y is not None for _, y in points):
                    axis.plot(*zip(*points, strict=True), style, label=f"{model}, {_LABELS[who]}")
        axis.set(xlabel={"size": "image side, pixels", "depth": "blocks"}[along], ylabel=label, ylim=(0, None))
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, path)


def draw_roofline(rows: Sequence[dict[str, Any]], peak: float, copying: float, path: Path) -> None:
    """Each network's rate of arithmetic over its intensity, under what the machine's products and memory allow.

    Intensity counts every weight and every operator's output once, read and written in float32: what would go through
    memory if no cache held anything between operators.
    """
    figure = new_figure(7, 4.5)
    axis = figure.subplots()
    intensity = [2.0**i for i in range(-1, 11)]
    axis.loglog(intensity, [min(peak, x * copying) / 1e9 for x in intensity], "k-", label="the machine")
    for row in rows:
        cost = complexity(row["model"], row["size"])
        x = cost.macs * row["batch"] / (4 * (cost.params + 2 * cost.activations * row["batch"]))
        for who, mark in (("ours", "o"), ("theirs", "s")):
            if who in row:
                axis.plot(x, row[who]["share"] * peak / 1e9, mark, color="C0" if who == "ours" else "C1")
        axis.annotate(f"{row['model']}@{row['size']}", (x, row["ours"]["share"] * peak / 1e9), fontsize=7)
    axis.set(xlabel="multiply-accumulates a byte", ylabel="billion multiply-accumulates a second")
    axis.set_title("blue: patchloom, fused; orange: peer", fontsize=9)
    save_figure(figure, path)
