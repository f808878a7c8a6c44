"""How fine runs distinguish: the granularity matrix, train level by test level (thesis, Tables 2.5, 2.6 and 2.14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.console import Console
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.plots import new_figure, save_figure
from patchloom.search.columns import Labels, column_list
from patchloom.search.evaluation import evaluate_search
from patchloom.search.weights import open_weights
from patchloom.temporary import write_json
from patchloom.text import without_nan
from patchloom.training.run import Run

METRICS = {"knn": "kNN accuracy", "map": "mAP"}


def granularity(
    runs: Sequence[str],
    data: str,
    labels: Labels,
    *,
    condition: str = "none",
    workers: int = 0,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """kNN accuracy and mAP of every run on every label column.

    Returns:
        {"condition", "test_levels": [column], "runs": [{"run", "method", "train_level", "levels": {column: {...}}}]},
        the levels as `evaluate_search` gives them; a run without labels has the train level "none"
    """
    levels = column_list(labels)
    if not levels:
        raise PatchloomError("A granularity matrix needs the label columns to test on: --labels COLUMN...")
    rows = []
    for run in runs:
        if console is not None:
            console.say(f"{run}:")
        network = open_weights(run, None, device)
        found = evaluate_search(run, data, levels, condition=condition, workers=workers, device=device, console=console)
        rows.append(
            {
                "run": str(run),
                "method": _method(run),
                "train_level": getattr(network, "label_column", None) or _level_of_clusters(run) or "none",
                "levels": found["levels"],
            }
        )
    return {"condition": condition, "test_levels": levels, "runs": rows}


def _method(run: str) -> str:
    """The recipe of a run; the name of anything else."""
    return str(_settings(run).get("recipe_name") or Path(run).name)


def _level_of_clusters(run: str) -> str | None:
    """The label column behind a run that learned clusters (ClusterFit+): that of the network whose vectors they are."""
    settings = _settings(run)
    return settings.get("labels") if settings.get("clusters_from") else None


def _settings(run: str) -> Mapping[str, Any]:
    """The settings of a run; empty for anything else."""
    try:
        return Run.open(Path(run)).settings
    except PatchloomError:
        return {}


def matrix(found: Mapping[str, Any], metric: str) -> tuple[list[str], list[str], list[list[float]]]:
    """Names of the columns (method and train level), names of the rows (test levels), and the values."""
    order = ["none", *found["test_levels"]]
    runs = sorted(
        found["runs"],
        key=lambda one: (one["method"], order.index(one["train_level"]) if one["train_level"] in order else len(order)),
    )
    columns = [f"{one['method']}: {one['train_level']}" for one in runs]
    values = [[one["levels"][level][metric] for one in runs] for level in found["test_levels"]]
    return columns, list(found["test_levels"]), values


def table_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """One row per run: what it was trained on, and kNN / mAP in percent for every test level."""
    rows = [["method", "train level", *(f"{level} kNN / mAP" for level in found["test_levels"]), ""]]
    for one in found["runs"]:
        cells = (one["levels"][level] for level in found["test_levels"])
        scores = [f"{100 * cell['knn']:.1f} / {100 * cell['map']:.1f}" for cell in cells]
        rows.append([one["method"], one["train_level"], *scores, ""])
    return rows


def write_matrix(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write matrix.json and a heat map of both metrics."""
    figure_path, json_path = folder / "matrix.png", folder / "matrix.json"
    write_json(json_path, without_nan(found))
    columns, rows, _ = matrix(found, "map")
    figure = new_figure(2.6 + 1.6 * len(columns), 2.2 + 0.9 * len(rows))
    for axes, (metric, title) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
        values = matrix(found, metric)[2]
        axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(title)
        axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("trained on")
        axes.set_ylabel("tested on")
        for i, line in enumerate(values):
            for j, value in enumerate(line):
                axes.text(j, i, f"{100 * value:.1f}", ha="center", va="center", color="w" if value < 0.7 else "k")
    save_figure(figure, figure_path)
    return [json_path, figure_path]
