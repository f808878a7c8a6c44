"""Grafit in the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchloom.recipes.grafit import RetrievalOptions
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.evaluate import evaluate, predict
from patchloom.tasks.retrieval.metrics import KNN
from patchloom.tasks.retrieval.plan import plan
from patchloom.tasks.retrieval.sequence import ClustersAfter
from patchloom.tasks.retrieval.setup import open_task
from patchloom.tasks.spec import TaskSpec


def _summary(record: Mapping[str, Any]) -> str | None:
    name = "ema_knn" if "ema_knn" in record else "knn"
    if name not in record:
        return None
    return f"kNN accuracy on {record['count']} held-out images, in the classes trained on: {record[name]:.2%}."


SPEC = TaskSpec(
    name="retrieval",
    labels=("grafit",),
    options=RetrievalOptions,
    metric=KNN,
    config_from_json=RetrievalConfig.from_json,
    open=open_task,
    sequence_from_json=ClustersAfter.from_json,
    plan=plan,
    evaluate=evaluate,
    predict=predict,
    summary=_summary,
    curves=("knn", "ema_knn", "train_loss"),
)
