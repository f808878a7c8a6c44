"""Scalars over a run as functions of the step: nothing to step, nothing to save, nothing to shift on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from patchloom.recipes.recipe import Recipe
from patchloom.text import count


@dataclass(frozen=True)
class Schedule:
    """A value that goes from `start` to `end`: a learning rate, a weight decay, a momentum, a temperature.

    Warm-up: from `warmup_from` to `start`, linear over `warmup`. Then, at time t of T,

        cosine         end + (start - end) (1 + cos(pi t / T)) / 2
        linear         start + (end - start) t / T
        step           start / 10 after each of `marks`
        inverse_sqrt   start sqrt(warmup / t), or start / sqrt(t) from 1 on without a warm-up
        constant       start

    Time is in any one unit, steps or epochs. The curve begins at 0, not at the end of the warm-up, as published.
    """

    start: float
    end: float
    shape: Literal["cosine", "linear", "step", "constant", "inverse_sqrt"] = "cosine"
    warmup: float = 0.0
    warmup_from: float = 0.0
    marks: tuple[float, ...] = ()

    def at(self, time: float, total: float) -> float:
        """The value at `time` of `total`, both in the unit of `warmup` and `marks`."""
        if time < self.warmup:
            return self.warmup_from + time * (self.start - self.warmup_from) / self.warmup
        if self.shape == "cosine":  # an end above the start is reached too: CaiT's transfers go from 5e-6 to 1e-5
            return self.end + (self.start - self.end) * (1 + math.cos(math.pi * time / total)) / 2
        if self.shape == "linear":
            return self.start + (self.end - self.start) * time / total
        if self.shape == "step":
            return self.start * 0.1 ** sum(time >= mark for mark in self.marks)
        # Falls from the end of the warm-up on, as in "Attention is all you need".
        if self.shape == "inverse_sqrt":
            return self.start * math.sqrt((self.warmup or 1.0) / max(time, self.warmup or 1.0))
        return self.start


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """The number of updates of a run."""
    return recipe.steps if recipe.steps is not None else recipe.epochs * steps_per_epoch


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The rate of update `step` (from 0 on). With `warmup_steps` time is in steps, otherwise in epochs."""
    if recipe.warmup_steps is not None:
        total_in_steps = total_steps(recipe, steps_per_epoch)
        # decay_epochs are given in epochs; here time is in steps, so they keep their share of the whole run.
        drops = tuple(epoch * total_in_steps / recipe.epochs for epoch in recipe.decay_epochs)
        rate = Schedule(recipe.lr, recipe.min_lr, recipe.schedule, recipe.warmup_steps, recipe.warmup_lr, drops)
        return rate.at(step, total_in_steps)
    # By default the rate changes with every step, at fractions of an epoch.
    epochs = step / steps_per_epoch
    if recipe.schedule_published:  # the published script steps with the epoch just finished, and never reaches the end
        epochs = float(max(0, step // steps_per_epoch - 1))
    elif recipe.schedule_by == "epoch":
        epochs = float(step // steps_per_epoch)
    total, warmup = float(recipe.epochs), recipe.warmup_epochs
    marks: tuple[float, ...] = recipe.decay_epochs
    if recipe.steps is not None:  # the same shares of the run as in the recipe's epochs
        total = recipe.steps / steps_per_epoch
        marks = tuple(mark * total / recipe.epochs for mark in marks)
        warmup *= total / recipe.epochs if warmup >= total else 1
    rate = Schedule(recipe.lr, recipe.min_lr, recipe.schedule, warmup, recipe.warmup_lr, marks)
    return rate.at(epochs, total)


def warmup_warning(recipe: Recipe, total: int) -> str | None:
    """A warning if the run of `total` steps ends within its warm-up, else None. It is given when the run begins: with a
    duration in epochs, the data decides the number of steps."""
    if not recipe.warmup_steps or recipe.warmup_steps < total:
        return None
    return (
        f"Warning: the warm-up of {count(recipe.warmup_steps, 'step')} does not end within the run of "
        f"{count(total, 'step')}: the learning rate stays below {recipe.lr:.3g}. Set a smaller warmup_steps."
    )


def weight_decay(recipe: Recipe, step: int, total: int) -> float:
    """The weight decay of update `step` where it changes along the run (`weight_decay_end`)."""
    end = recipe.weight_decay if recipe.weight_decay_end is None else recipe.weight_decay_end
    return Schedule(recipe.weight_decay, end).at(step, total)
