"""What a run leaves by default: its modules as one file, and a report with curves and settings."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from typing import TYPE_CHECKING, Any

from patchloom.temporary import write_json
from patchloom.training.report import epoch_records, write_report
from patchloom.training.run import Run
from patchloom.training.sharding import whole_tensors
from patchloom.weights.files import write

if TYPE_CHECKING:
    from patchloom.training.task import Result

_CHARTS = {
    "loss": {"training": "train_loss", "held out": "loss", "averaged": "ema_loss"},
    "learning rate": {"": "lr"},
}


def export_modules(run: Run, result: Result, names: Collection[str], is_main_process: bool) -> None:
    """Write report.html, then the modules `names` to export/model.safetensors. A single module keeps its own tensor
    names; those of several begin with the name of the module. model.json comes last: with it a run is finished."""
    tensors = {name: whole_tensors(result.modules[name]) for name in names}  # every process: they may be sharded
    if not is_main_process:
        return
    prefixes = {name: "" if len(tensors) == 1 else f"{name}." for name in tensors}
    flat = {f"{prefixes[name]}{key}": tensor for name, part in tensors.items() for key, tensor in part.items()}
    flat = {name: tensor.clone() for name, tensor in flat.items()}  # tied weights: each name has memory of its own
    write_plain_report(run)
    folder, label = run.folder / "export", run.settings.get("task")
    write(folder / "model.safetensors", flat, {"task": label})
    described: dict[str, Any] = {
        "task": label,
        "modules": list(names),
        "step": result.step,
        "weights": "averaged" if result.averaged else "raw",
        "best": dict(result.best),
    }
    write_json(folder / "model.json", described)


def write_plain_report(run: Run) -> None:
    """The last values of the log, curves and settings."""
    records = epoch_records(run)
    last = {key: value for key, value in (records[-1] if records else {}).items() if isinstance(value, float)}
    cells = "".join(
        f"<div><b>{value:.4g}</b><span class=soft>{escape(key)}</span></div>"
        for key, value in last.items()
        if key not in ("lr", "time") and not key.endswith("per_second")
    )
    title = f"{run.settings.get('model', {}).get('name', 'Run')} on {run.settings.get('data', 'own data')}"
    headline = f"<h1>{escape(title)}</h1><div class=figures>{cells}</div>"
    others = [key for key in last if key not in ("lr", "loss", "train_loss", "time") and not key.startswith("ema_")]
    metrics = {key: {"": key, "averaged": f"ema_{key}"} for key in others if not key.endswith("per_second")}
    write_report(run, title, headline, [], {**_CHARTS, **metrics})
