"""Accuracy as a function of the test crop or of the test resolution (thesis Fig. 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.inference.items import held_out_by, open_items
from patchloom.inference.models import Model, test_preprocessing
from patchloom.plots import new_figure, save_figure
from patchloom.tasks.classification.evaluate import ready, real_accuracy, scores

SETTINGS = {"crop_ratio": "crop ratio", "resolution": "resolution, pixels"}  # what can be swept, and the axis label


def sweep(
    model: Model,
    data: str | PathLike[str],
    setting: str,
    values: Sequence[float],
    *,
    real: Any = None,
    labels: str | None = None,
    split: str | None = None,
    base: Model | None = None,
    workers: int = 0,
    strict: bool = False,
    console: Console | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Evaluate a model once per value of `setting`, "crop_ratio" or "resolution", on the same images.

    Returns one row per value, in the given order: the value under the name of the setting, count, top1, top5, loss and
    ece as `evaluate` gives them, and real_top1 and real_count with `real`, the labels of `real_accuracy`. Other options
    are those of `scores`. Every value is checked before the first evaluation.
    """
    if setting not in SETTINGS:
        raise PatchloomError(f"A sweep is over {' or '.join(SETTINGS)}, not {setting!r}.")
    if not values:
        raise PatchloomError(f"A sweep over {setting} needs at least one value.")
    network = _check_values(model, base, setting, values, options)
    # Listed and checked once for all values.
    images = open_items(data, labels, split, held_out_by(model, data), strict, workers, console)
    rows = []
    for i, value in enumerate(values):
        if console is not None:
            console.progress(f"{setting} {value}: {i + 1} of {len(values)}")
        given = {**options, setting: value, "base": base, "workers": workers}
        # how classes are matched does not depend on the value: it is printed once
        result = scores(
            model, data, images=images, network=network, console=Console(quiet=True) if i else console, **given
        )
        summary = result.summary() | ({} if real is None else real_accuracy(result, real))
        for name in ("per_class", "weights"):  # those are printed once
            summary.pop(name, None)
        rows.append({setting: value, **summary})
    return rows


def _check_values(model: Model, base: Model | None, setting: str, values: Sequence[Any], fixed: dict[str, Any]) -> Any:
    """Refuse a wrong value before time is spent on those before it. Returns the network, if all values share it."""
    given = {name: fixed[name] for name in ("int8", "device") if name in fixed}
    if setting == "crop_ratio":
        network = ready(model, fixed.get("resolution"), base, **given)
        for ratio in values:
            test_preprocessing(network, ratio)
        return network
    for size in values:
        # One at a time: several could be too much for the memory.
        test_preprocessing(ready(model, size, base, **given), fixed.get("crop_ratio"))
    return None


def sweep_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; each line starts with the value."""
    setting = _setting(rows)
    real = "real_top1" in rows[0]
    lines = [f"{setting:>10}{'top-1':>9}{'top-5':>9}{'loss':>9}{'ECE':>9}{'images':>9}" + f"{'ReaL':>9}" * real]
    for row in rows:
        line = f"{row[setting]:>10g}{row['top1']:9.2%}{row['top5']:9.2%}{row['loss']:9.4f}{row['ece']:9.2%}"
        lines.append(f"{line}{row['count']:9}" + (f"{row['real_top1']:9.2%}" if real else ""))
    return "\n".join(lines)


def draw_sweep(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Top-1 and top-5 (and ReaL) on the left, the cross-entropy on the right, over the values."""
    setting = _setting(rows)
    rows = sorted(rows, key=lambda row: float(row[setting]))
    values = [row[setting] for row in rows]
    figure = new_figure(9, 3.6)
    accuracy, loss = figure.subplots(1, 2)
    for name, label in {"top1": "top-1", "top5": "top-5", "real_top1": "ReaL"}.items():
        if name in rows[0]:
            accuracy.plot(values, [100 * row[name] for row in rows], marker="o", label=label)
    accuracy.set(ylabel="accuracy, %", title=f"accuracy on {rows[0]['count']} images")
    accuracy.legend()
    loss.plot(values, [row["loss"] for row in rows], marker="o", color="black")
    loss.set(ylabel="cross-entropy", title="loss")
    for panel in (accuracy, loss):
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.set_xlabel(SETTINGS[setting])
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def _setting(rows: Sequence[dict[str, Any]]) -> str:
    return next(name for name in SETTINGS if name in rows[0])
