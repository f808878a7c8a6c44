"""The learning rate as a function of the step: nothing to step, nothing to save, nothing to shift on resume."""

from __future__ import annotations

import math

from patchloom.recipes.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The rate of update `step` (from 0 on).

    Warm-up: from `warmup_lr` to `lr`, linear in time. Then, t epochs after the beginning of E,
    min_lr + (lr - min_lr) (1 + cos(pi t / E)) / 2: the cosine starts at 0, not at the end of the warm-up, as published.
    """
    epochs = step / steps_per_epoch
    if recipe.schedule_published:  # the published script steps with the epoch just finished, and never reaches the end
        epochs = float(max(0, step // steps_per_epoch - 1))
    elif recipe.schedule_by == "epoch":
        epochs = float(step // steps_per_epoch)
    if epochs < recipe.warmup_epochs:
        return recipe.warmup_lr + epochs * (recipe.lr - recipe.warmup_lr) / recipe.warmup_epochs
    return _after_warmup(recipe, epochs)


def _after_warmup(recipe: Recipe, epochs: float) -> float:
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "step":
        return recipe.lr * 0.1 ** sum(epochs >= mark for mark in recipe.decay_epochs)
    # a rate below its floor rises to it, as in the published transfers to CIFAR (5e-6 to 1e-5)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * epochs / recipe.epochs)) / 2
