"""Runs with parts of the user's own in the registry: listed and reported, started and continued from Python."""

from __future__ import annotations

from typing import Any, NoReturn

from patchloom.errors import PatchloomError
from patchloom.recipes.options import ClassificationOptions
from patchloom.tasks.own.config import OwnConfig
from patchloom.tasks.spec import TaskSpec
from patchloom.training.task import Metric

MESSAGE = "The run has parts of its own: run the Python script that started it again, and it continues."


def _from_python_only(*_: Any, **__: Any) -> NoReturn:
    raise PatchloomError(MESSAGE)


SPEC = TaskSpec(
    name="own",
    labels=("own",),
    options=ClassificationOptions,
    metric=Metric("loss", higher_is_better=False),
    config_from_json=OwnConfig.from_json,
    open=_from_python_only,
    plan=_from_python_only,
    evaluate=_from_python_only,
    predict=_from_python_only,
    curves=("top1", "loss", "train_loss"),
)
