"""Which kind of learning a model comes from, and the functions for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.reading import read_json
from patchloom.tasks.registry import default_task, find_task, task_specs
from patchloom.tasks.spec import TaskSpec
from patchloom.training.run import Run, folders_of
from patchloom.weights.files import metadata_of


def task_of(model: Any) -> TaskSpec:
    """The task of a run folder, an export, a weight file or a network; of anything else, the default."""
    if isinstance(model, str | os.PathLike) and str(model):
        place = Path(model)
        if place.suffix == ".safetensors" and (label := _label_of(place)):
            return find_task(label)
        # A file in export/ or checkpoints/ has its run two levels above.
        for folder in folders_of(place) if place.exists() else ():  # not for published names
            if label := _label_in(folder):
                return find_task(label)
    kind = getattr(getattr(model, "config", None), "kind", None)
    applies = (spec for spec in task_specs() if spec.network_kind == kind) if kind is not None else iter(())
    return next(applies, None) or default_task()


def _label_of(file: Path) -> str | None:
    """The task that the metadata of a file of weights names."""
    with suppress(PatchloomError, OSError):  # whoever loads it reports what is wrong
        if file.is_file():
            task = metadata_of(file).get("task")
            return None if task is None else str(task)
    return None


def _label_in(folder: Path) -> str | None:
    """The task that a folder's files name."""
    # A folder that cannot be read names no task: loading the model will say what is wrong with it.
    with suppress(PatchloomError, OSError, ValueError, KeyError):
        if (folder / "model.json").is_file():
            described = read_json(folder / "model.json")
            if isinstance(described, dict) and "task" in described:
                return str(described["task"])
        if (folder / "recipe.yaml").is_file():
            return str(Run.open(folder).settings["task"])
    return None


def evaluate(model: Any, data: Any, **options: Any) -> dict[str, Any]:
    """Metrics of a model on labelled data, by the task that it was trained for.

    Of a classifier: top1 with its 95 % interval, top5, loss, ece (fractions), count and per_class; options as of
    `patchloom.tasks.classification.evaluate.scores`.
    """
    return task_of(model).evaluate(model, data, **options)


def predict(model: Any, inputs: Any, **options: Any) -> list[dict[str, Any]]:
    """One row per input, in order, by the task that the model was trained for.

    Of a classifier: {path, predictions: [{class, probability}]} or {path, error}; options as of
    `patchloom.inference.predict.predict`.
    """
    return task_of(model).predict(model, inputs, **options)
