"""Self-supervised pre-training in the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchloom.recipes.pretraining import PretrainingOptions
from patchloom.tasks.pretraining.config import LABEL, PretrainingConfig
from patchloom.tasks.pretraining.evaluate import evaluate, predict
from patchloom.tasks.pretraining.plan import plan
from patchloom.tasks.pretraining.probes import KNN, LINEAR
from patchloom.tasks.pretraining.sequence import BeitAfterTokenizer
from patchloom.tasks.pretraining.setup import open_task
from patchloom.tasks.spec import TaskSpec
from patchloom.training.task import Metric


def _summary(record: Mapping[str, Any]) -> str | None:
    if KNN not in record:
        return None
    linear = f", of a linear probe {record[LINEAR]:.2%}" if LINEAR in record else ""
    return f"Accuracy on held-out images of kNN {record[KNN]:.2%}{linear}, with the features learned without labels."


SPEC = TaskSpec(
    name="pretraining",
    labels=(LABEL,),
    options=PretrainingOptions,
    metric=Metric(KNN, percent=True),
    config_from_json=PretrainingConfig.from_json,
    open=open_task,
    plan=plan,
    evaluate=evaluate,
    predict=predict,
    sequence_from_json=BeitAfterTokenizer.from_json,
    summary=_summary,
    curves=(KNN, LINEAR, "train_loss"),
)
