"""What a run prints: a line per evaluation, and a line between them that is rewritten after every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from patchloom.console import Console, duration
from patchloom.recipes.recipe import Recipe
from patchloom.training.counters import Counters
from patchloom.training.task import Task


class Progress:
    """Speed and remaining time, measured from where this process began."""

    def __init__(self, task: Task, recipe: Recipe, total: int, console: Console) -> None:
        self.task, self.recipe, self.total, self.console = task, recipe, total, console
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start the clock at `step`: a resumed run measures its own speed, not that of the run before."""
        self.start, self.begun, self.processed = step, time.monotonic(), 0.0

    def count(self, weight: float) -> None:
        """Note what all processes together have processed in a step: images, tokens, ..."""
        self.processed += weight

    def speed(self) -> float:
        """Images (or tokens) per second."""
        return self.processed / max(time.monotonic() - self.begun, 1e-9)

    def left(self, step: int) -> str:
        """The remaining time, from the mean time per step since `begin`; evaluations and checkpoints included."""
        done = step - self.start
        if not done:
            return "beginning"
        return f"{duration((self.total - step) * (time.monotonic() - self.begun) / done)} left"

    def line(self, record: Mapping[str, Any]) -> str:
        """One line of text about an evaluation: epoch, losses, metric, learning rate, speed and remaining time."""
        metric = self.task.metric
        shown = [f"{name} {record[name]:.4f}" for name in ("train_loss", "loss") if name in record]
        if metric is not None:
            names = (metric.name, f"ema_{metric.name}")
            shown += [f"{name} {metric.text(record[name])}" for name in names if name in record and name != "loss"]
        done = f"epoch {record['epoch']:>3}/{self.recipe.epochs}"
        if self.recipe.steps is not None:
            done = f"step {record['step']}/{self.total}"
        if not record["step"]:  # the evaluation before the first step
            return "  ".join([done, *shown, "before training"])
        rate = f"{self.speed():.0f} {self.task.unit}/s"
        return f"{done}  {'  '.join(shown)}  lr {record['lr']:.2e}  {rate}  {self.left(record['step'])}"

    def show(self, counters: Counters) -> None:
        """Rewrite the line with the current step, loss and speed."""
        mean = counters.loss_sum / max(1.0, counters.weight)
        step = f"step {counters.step}/{self.total}"
        self.console.progress(
            f"{step}  loss {mean:.4f}  {self.speed():.0f} {self.task.unit}/s  {self.left(counters.step)}"
        )
