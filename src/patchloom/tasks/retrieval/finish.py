"""The end of a Grafit run: embeddings with the final weights, the report, and the exported network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.models.registry import rebuild
from patchloom.tasks.retrieval.images import labels_of
from patchloom.tasks.retrieval.metrics import knn_accuracy
from patchloom.tasks.retrieval.networks import MODEL
from patchloom.tasks.retrieval.report import CHARTS, retrieval_sections
from patchloom.temporary import write_json
from patchloom.training.report import write_report
from patchloom.training.run import Run
from patchloom.training.sharding import whole_tensors
from patchloom.training.task import Result
from patchloom.weights.save import save

if TYPE_CHECKING:
    from patchloom.tasks.retrieval.task import Retrieval


def finish(task: Retrieval, run: Run, result: Result) -> None:
    """Embed all images with the final weights, then write the report and the export, which comes last."""
    trained: Any = result.modules[MODEL]
    items, queries = task.final_embeddings(trained)
    whole = whole_tensors(trained)
    if not task.processes.is_main_process:
        return
    network: Any = rebuild(trained, whole)
    held_out: dict[str, Any] | None = None
    if task.source.labelled and task.split.held_out:
        labels, truth = labels_of(task.split.train), labels_of(task.split.held_out)
        k = min(task.recipe.neighbours, len(labels))
        held_out = {"count": len(truth), "knn": knn_accuracy(queries, truth, items, labels, k), "k": k}
    headline, sections = retrieval_sections(run, task, network, items, queries, held_out)
    write_report(run, f"{network.config.name} on {run.settings['data']}", headline, sections, CHARTS)
    weights = "averaged" if result.averaged else "raw"
    described = {
        "task": run.settings["task"],
        "step": result.step,
        "weights": weights,
        "held_out": held_out,
        "best": dict(result.best),
    }
    export_network(run.folder / "export", network, described)
    task.console.say(
        f"The report is {run.folder / 'report.html'}, the {weights} weights are in {run.folder / 'export'}."
    )


def export_network(folder: Path, network: Any, described: dict[str, Any]) -> None:
    """model.safetensors with trunk and projector, and model.json for programs that do not read safetensors."""
    save(network, folder / "model.safetensors")
    values = {
        "config": network.config.to_json(),
        "class_names": network.class_names,
        "label_column": network.label_column,
        "preprocessing": network.preprocessing.to_json(),
        **described,
    }
    write_json(folder / "model.json", values)
