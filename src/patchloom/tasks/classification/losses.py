"""Losses against soft targets (B, classes); each gives one value per image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError, errors_in
from patchloom.recipes.recipe import Recipe
from patchloom.text import describe


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
    # The mean over classes, not their sum: the published learning rates assume it.
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(dim=-1)


def recipe_loss(recipe: Recipe, logits: Tensor, targets: Tensor) -> Tensor:
    """The recipe's loss, one value per image.

    Args:
        logits: (B, classes).
        targets: soft targets (B, classes), smoothed and mixed.
    """
    if recipe.loss == "bce":
        return binary_cross_entropy(logits, targets, recipe.bce_threshold)
    return cross_entropy(logits, targets)


Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the batch, or one value per sample (B,)


def summed_loss(loss: Loss | None, outputs: Any, targets: Any, samples: int) -> Tensor:
    """A user's own loss as the loop takes it: one value per sample (B,), or a mean times the number of samples."""
    assert loss is not None
    with errors_in(f"The loss, called with outputs {describe(outputs)} and targets {describe(targets)},"):
        value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.shape not in {(), (samples,)}:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise PatchloomError(
            f"The loss returns {found}; it must return a tensor with one value for the batch (its mean), or with one "
            f"per sample, of shape ({samples},)."
        )
    # The loop divides sums by the number of samples, so a mean becomes a sum here.
    return value * samples if value.ndim == 0 else value
