"""Plots of measurements: scaling curves and a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchloom.plots import new_figure, save_figure

_LABELS = {"ours": "patchloom, fused", "theirs": "peer"}
_MEASURES = (("throughput", "images per second"), ("memory_mb", "memory of a forward pass, MB"))


def draw_scaling(rows: Sequence[dict[str, Any]], along: str, path: Path) -> None:
    """Plot throughput and memory against image size or depth (`along`), one line per model and side."""
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
    """Plot the share of the rate of a large matrix product against arithmetic intensity, under the roofline of
    arithmetic and memory.

    Intensity counts every weight, and the output of every operator once read and once written, in float32: the traffic
    if caches held nothing between operators. The share counts the whole network, even if the last block is computed
    for the class token only.
    """
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    # From 1/2 to 128 multiply-accumulates per byte.
    intensity = [2.0 ** (i / 4) for i in range(-4, 29)]
    axis.semilogx(
        intensity, [min(1.0, x * copying / peak) for x in intensity], "k-", label="arithmetic and memory limits"
    )
    for number, row in enumerate(rows):
        macs, params, activations = (row["cost"][key] for key in ("macs", "params", "activations"))
        # multiply-accumulates per byte of traffic
        x = macs * row["batch"] / (4 * (params + 2 * activations * row["batch"]))
        shares = [row[who]["share"] for who in ("ours", "theirs") if who in row]
        label, color = f"{row['model']}, {row['size']} px", f"C{number}"
        axis.plot([x] * len(shares), shares, "-", color=color, linewidth=1)
        axis.plot(x, shares[0], "o", color=color, label=label)
        axis.plot([x] * len(shares[1:]), shares[1:], "o", color=color, markerfacecolor="white")
    axis.set(
        xlabel="multiply-accumulates per byte", ylabel="share of the rate of a large matrix product", ylim=(0, None)
    )
    axis.set_title("filled: patchloom, fused; hollow: its peer", fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, path)
