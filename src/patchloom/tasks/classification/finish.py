"""The end of a classification run: the last scores, the report, and the exported network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.models.network import Network
from patchloom.models.registry import rebuild
from patchloom.tasks.classification.report import CHARTS, classification_sections
from patchloom.temporary import write_json
from patchloom.training.report import write_report
from patchloom.training.run import Run
from patchloom.training.sharding import whole_tensors
from patchloom.training.task import Result
from patchloom.weights.load import load
from patchloom.weights.save import save, save_delta

if TYPE_CHECKING:
    from patchloom.tasks.classification.task import Classification


def finish(task: Classification, run: Run, result: Result) -> None:
    """Score the held-out images, then write the report and the export, which comes last: with it a run is finished."""
    trained: Any = result.modules["model"]
    # Both need every process: scoring shares the images, and sharded tensors must be gathered. Only then may the others
    # leave.
    scores, whole = task.scores(trained) if task.split.held_out else None, whole_tensors(trained)
    if not task.processes.is_main_process:
        return
    network = rebuild(trained, whole)
    weights = "averaged" if result.averaged else "raw"
    metadata = {
        "task": run.settings["task"],
        "step": result.step,
        "weights": weights,
        "held_out": {key: value for key, value in scores.summary().items() if key != "per_class"} if scores else None,
        "best": result.best,
    }
    headline, sections = classification_sections(run, task.source, task.split.held_out, scores, network)
    write_report(run, f"{network.config.name} on {run.settings['data']}", headline, sections, CHARTS)
    start, folder = task.config.start, run.folder / "export"
    if start is not None and start.delta:
        save_delta(network, folder / "delta.safetensors", load(start.weights, **start.hints), start.weights)
    export_network(folder, network, metadata)
    task.console.say(f"The report is {run.folder / 'report.html'}, the {weights} weights are in {folder}.")


def export_network(folder: Path, network: Network, metadata: Mapping[str, Any]) -> None:
    """model.safetensors, which describes itself, and model.json for programs that do not read safetensors."""
    save(network, folder / "model.safetensors")
    described = {
        "config": network.config.to_json(),
        "class_names": network.class_names,
        "preprocessing": network.preprocessing.to_json(),
        **metadata,
    }
    write_json(folder / "model.json", described)
