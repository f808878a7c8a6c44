"""Classification in the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchloom.inference.predict import predict
from patchloom.recipes.options import ClassificationOptions
from patchloom.tasks.classification.config import ClassificationConfig, upgrade_settings
from patchloom.tasks.classification.evaluate import evaluate
from patchloom.tasks.classification.metrics import TOP1, interval_text
from patchloom.tasks.classification.plan import plan
from patchloom.tasks.classification.sequence import FinishHigh
from patchloom.tasks.classification.setup import open_task
from patchloom.tasks.classification.sheet import write_sheet
from patchloom.tasks.spec import TaskSpec


def _summary(record: Mapping[str, Any]) -> str | None:
    return f"Top-1 on held-out images: {interval_text(record)}." if "top1_interval" in record else None


SPEC = TaskSpec(
    name="classification",
    labels=("classify", "distill", "finetune"),
    options=ClassificationOptions,
    metric=TOP1,
    config_from_json=ClassificationConfig.from_json,
    open=open_task,
    plan=plan,
    evaluate=evaluate,
    predict=predict,
    default=True,
    show=write_sheet,
    upgrade=upgrade_settings,
    sequence_from_json=FinishHigh.from_json,
    summary=_summary,
    curves=("top1", "ema_top1", "loss", "train_loss"),
)
