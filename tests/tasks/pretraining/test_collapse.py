"""Runs that were broken on purpose say that they collapsed, and why; healthy ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretraining_runs
import pytest
import torch
from PIL import Image

from patchloom.console import Console
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.pretraining.dino import Dino
from patchloom.tasks.pretraining.method import Progress
from patchloom.tasks.pretraining.spread import feature_spread, same_features

labelled, pretrain = pretraining_runs.labelled, pretraining_runs.pretrain

Pretrain = Callable[..., Path]


def said(pretrain: Pretrain, data: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    pretrain(data, **{"console": Console(), "epochs": 10, **changes})
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if "collapse" in line)


def test_a_healthy_run_says_nothing(labelled: Path, pretrain: Pretrain, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(pretrain, labelled, capsys) == ""


def test_images_that_are_all_alike(pretrain: Pretrain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "black").mkdir()
    for i in range(24):
        Image.new("RGB", (40 + i % 5, 40)).save(tmp_path / "black" / f"{i}.png")
    found = said(pretrain, tmp_path / "black", capsys, epochs=2)
    assert "The features of all images are the same" in found
    assert found.count("collapsed") == 1, "it is said once"


def test_a_teacher_that_is_not_sharp(labelled: Path, pretrain: Pretrain, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(pretrain, labelled, capsys, teacher_temperature=2.0, teacher_temperature_start=2.0)
    assert "Lower teacher_temperature (2)" in found


def test_a_rate_that_is_too_high(labelled: Path, pretrain: Pretrain, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {"lr": 0.1, "teacher_momentum": 0.0, "teacher_momentum_end": 0.0, "clip_grad": 0.0, "center_momentum": 1.0}
    found = said(pretrain, labelled, capsys, **broken)
    assert "collapsed" in found
    assert "lr (0.1)" in found or "lower lr" in found


@pytest.mark.parametrize(
    ("each", "mean", "step", "cause"),
    [
        (5.50, 5.51, 50, "teacher_temperature"),  # uniform
        (0.01, 0.02, 50, "center_momentum"),  # one prototype
        (2.00, 2.01, 50, "center_momentum"),  # the same few prototypes
        (4.06, 4.99, 50, None),
        (0.20, 5.40, 50, None),
        (5.50, 5.51, 5, None),  # too early to tell
    ],
)
def test_the_cause_is_read_off_both_entropies(each: float, mean: float, step: int, cause: str | None) -> None:
    method = Dino.__new__(Dino)
    method.recipe = find_recipe("dino@small").replace(prototypes=256)
    found = method.collapse({"entropy": each, "entropy_of_mean": mean, "std": 0.7}, Progress(step, 100))
    assert (found is None) == (cause is None)
    assert cause is None or cause in str(found)
    assert mean < math.log(256) + 0.01


def test_the_spread_is_one_in_all_directions_and_zero_in_one() -> None:
    assert feature_spread(torch.randn(2000, 16)) == pytest.approx(1.0, abs=0.02)
    same = torch.randn(1, 16).expand(50, -1)
    assert feature_spread(same * torch.rand(50, 1)) == pytest.approx(0.0, abs=1e-6)
    assert same_features(0.0) is not None
    assert same_features(0.2) is None
