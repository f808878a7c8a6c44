"""Runs with parts of the user's own in the registry: listed and reported, started and continued from Python."""

from __future__ import annotations

from typing import Any, NoReturn

from patchloom.errors import PatchloomError
from patchloom.inference.predict import predict as predict_classes
from patchloom.tasks.classification.evaluate import evaluate as evaluate_classes
from patchloom.tasks.own.config import OwnConfig, OwnOptions
from patchloom.tasks.spec import TaskSpec
from patchloom.training.task import Metric

CONTINUE = "The run has parts of its own: run the Python script that started it again, and it continues."


def _from_python_only(*_: Any, **__: Any) -> NoReturn:
    raise PatchloomError(CONTINUE)


SPEC = TaskSpec(
    name="own",
    labels=("own",),
    options=OwnOptions,
    metric=Metric("loss", higher_is_better=False),
    config_from_json=OwnConfig.from_json,
    open=_from_python_only,
    plan=_from_python_only,
    evaluate=evaluate_classes,  # of networks of ours; any other module only its owner can build
    predict=predict_classes,
    from_python=True,
    curves=("top1", "loss", "train_loss"),
)
