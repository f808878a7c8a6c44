"""Translation in the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchloom.recipes.translation import TranslationOptions
from patchloom.tasks.spec import TaskSpec
from patchloom.tasks.translation.config import TranslationRunConfig
from patchloom.tasks.translation.evaluate import evaluate
from patchloom.tasks.translation.plan import plan
from patchloom.tasks.translation.predict import predict
from patchloom.tasks.translation.setup import open_task
from patchloom.tasks.translation.task import BLEU


def _summary(record: Mapping[str, Any]) -> str | None:
    if "greedy_bleu" not in record:
        return None
    return (
        f"Held-out text: loss {record['loss']:.4f} per token, BLEU {record['greedy_bleu']:.2f} of greedy translations."
    )


SPEC = TaskSpec(
    name="translation",
    labels=("translate",),
    options=TranslationOptions,
    metric=BLEU,
    config_from_json=TranslationRunConfig.from_json,
    open=open_task,
    plan=plan,
    evaluate=evaluate,
    predict=predict,
    network_kind="text",
    summary=_summary,
    curves=("greedy_bleu", "loss", "train_loss"),
)
