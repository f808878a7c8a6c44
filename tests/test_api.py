"""The public functions that train take the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.console import Console
from patchloom.training.run import Run

OF_A_RUN = {"out", "recipe", "model_options", "strict", "log", "console", "device", "callbacks"}
SHORT: dict[str, Any] = {
    "epochs": 1, "batch_size": 512, "workers": 0, "device": "cpu", "console": Console(quiet=True),
}  # fmt: skip
TINY = {"model": "deit_nano", "recipe": "deit@small", "model_options": {"depth": 1, "dim": 24, "heads": 2}}


@pytest.mark.parametrize("name", ["train", "distill", "finetune", "grafit", "translate"])
def test_every_kind_of_run_has_the_same_options(name: str) -> None:
    assert set(inspect.signature(getattr(patchloom, name)).parameters) >= OF_A_RUN


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1, dim=24, heads=2)
    patchloom.save(network, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.mark.parametrize(
    "start",
    [
        lambda weights, **options: patchloom.train("digits", **TINY, **options),
        lambda weights, **options: patchloom.distill(weights, "digits", **TINY, **options),
        lambda weights, **options: patchloom.finetune(weights, "digits", **options),
    ],
    ids=["train", "distill", "finetune"],
)
def test_callbacks_are_called_after_steps_and_evaluations(
    start: Callable[..., Run], weights: Path, tmp_path: Path
) -> None:
    steps: list[int] = []
    evaluations: list[dict[str, Any]] = []

    class Noted(patchloom.Callback):
        def after_step(self, step: int, losses: Any) -> None:
            steps.append(step)

        def after_evaluation(self, record: Any) -> None:
            evaluations.append(dict(record))

    run = start(weights, out=tmp_path / "run", callbacks=[Noted()], **SHORT)
    assert steps == [1, 2]
    assert evaluations == run.records()
    assert len(evaluations) == 1
