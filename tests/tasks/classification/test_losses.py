"""Losses against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from conftest import assert_close
from patchloom.data.mixing import soft_targets
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.losses import binary_cross_entropy, cross_entropy, recipe_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_smoothed_targets_are_label_smoothing(smoothing: float) -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    ours = cross_entropy(logits, soft_targets(labels, 5, smoothing))
    assert_close(ours, F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none"), 1e-5)


def test_bce_counts_every_mixed_class_as_present() -> None:
    logits = torch.randn(2, 4)
    mixed = torch.tensor([[0.7, 0.0, 0.3, 0.0], [0.0, 1.0, 0.0, 0.0]])
    present = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0]])
    want = F.binary_cross_entropy_with_logits(logits, present, reduction="none").mean(dim=1)
    assert_close(binary_cross_entropy(logits, mixed), want, 1e-6)
    soft = F.binary_cross_entropy_with_logits(logits, mixed, reduction="none").mean(dim=1)
    assert_close(binary_cross_entropy(logits, mixed, None), soft, 1e-6)


def test_bce_without_mixing_takes_the_labels() -> None:
    recipe = Recipe.of(ClassificationOptions, name="bce", loss="bce", label_smoothing=0.0, mixup=0.0, cutmix=0.0)
    logits, labels = torch.randn(3, 4), torch.tensor([1, 0, 3])
    want = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 4).float(), reduction="none").mean(dim=1)
    assert_close(recipe_loss(recipe, logits, soft_targets(labels, 4, 0.0)), want, 1e-6)
