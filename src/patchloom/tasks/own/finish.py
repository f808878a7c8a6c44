"""The export and the report of a run with parts of the user's own."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from patchloom.models.network import Network
from patchloom.training.report import epoch_records, write_report
from patchloom.training.run import Run, write_text
from patchloom.training.sharding import whole_tensors
from patchloom.training.task import Result, Task
from patchloom.weights.files import write
from patchloom.weights.save import save

if TYPE_CHECKING:
    from patchloom.tasks.own.task import Supervised

CHARTS = {
    "loss": {"training": "train_loss", "held out": "loss", "averaged": "ema_loss"},
    "top-1": {"held out": "top1", "averaged": "ema_top1"},
    "learning rate": {"": "lr"},
}


def finish(task: Supervised, run: Run, result: Result) -> None:
    """Write the report, then the tensors of the module under its own names."""
    module = result.modules["model"]
    tensors = whole_tensors(module)
    if not task.processes.is_main_process:
        return
    write_own_report(run, task.config.model)
    path = run.folder / "export" / "model.safetensors"
    if isinstance(module, Network):  # a network of ours describes itself, and `load` takes the file
        save(module, path)
    else:
        write(path, tensors, {"task": "own", "model": task.config.model})
    describe_export(run, result, task.config.model)
    task.console.say(f"The report is {run.folder / 'report.html'}, the weights are in {path.parent}.")


def export_modules(task: Task, run: Run, result: Result) -> None:
    """The export of a whole task of the user's own: all trained modules in one file, as MODULE.TENSOR."""
    tensors = {
        f"{name}.{key}": tensor for name in task.trained for key, tensor in whole_tensors(result.modules[name]).items()
    }
    write(run.folder / "export" / "model.safetensors", tensors, {"task": "own"})
    write_own_report(run, type(task).__name__)
    describe_export(run, result, type(task).__name__)


def write_own_report(run: Run, name: str) -> None:
    """Curves and settings."""
    records = epoch_records(run)
    last = {key: value for key, value in (records[-1] if records else {}).items() if isinstance(value, float)}
    cells = "".join(
        f"<div><b>{value:.4g}</b><span class=soft>{escape(key)}</span></div>"
        for key, value in last.items()
        if key not in ("lr", "time") and not key.endswith("per_second")
    )
    title = f"{name} on {run.settings.get('data', 'own data')}"
    write_report(run, title, f"<h1>{escape(title)}</h1><div class=figures>{cells}</div>", [], CHARTS)


def describe_export(run: Run, result: Result, name: str) -> None:
    """export/model.json, written last: with it a run is finished."""
    metadata: dict[str, Any] = {
        "task": "own",
        "model": name,
        "step": result.step,
        "weights": "averaged" if result.averaged else "raw",
        "best": dict(result.best),
    }
    write_text(run.folder / "export" / "model.json", json.dumps(metadata, indent=1) + "\n")
