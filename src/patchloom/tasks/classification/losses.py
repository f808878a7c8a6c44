"""Losses against soft targets (B, classes); each gives one value per image."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from patchloom.recipes.recipe import Recipe


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum_k t_k log p_k. With smoothed one-hot targets this is label smoothing, with mixed ones the Mixup loss."""
    return -(targets * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


def binary_cross_entropy(logits: Tensor, targets: Tensor, threshold: float | None = 0.0) -> Tensor:
    """The mean over classes of one binary cross-entropy each.

    With a threshold, a class counts as present (1) where its mixed target is above it: both images of a mixture get a
    full 1 (DeiT III). Without mixing that is the label itself.
    """
    if threshold is not None:
        targets = (targets > threshold).float()
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(dim=-1)


def recipe_loss(recipe: Recipe, logits: Tensor, targets: Tensor) -> Tensor:
    """The recipe's loss, one value per image."""
    if recipe.loss == "bce":
        return binary_cross_entropy(logits, targets, recipe.bce_threshold)
    return cross_entropy(logits, targets)
