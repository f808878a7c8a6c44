"""The length of a run, its learning rates, and its time, measured on a few small steps. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from patchloom.console import Console, duration
from patchloom.recipes.recipe import Recipe
from patchloom.training.loop import Loop
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate, total_steps
from patchloom.training.task import Task, first_tensor, head

_STEPS = 8


def measure_steps(task: Task, recipe: Recipe, processes: Processes, budget: float) -> tuple[float, float]:
    """Seconds per sample of computing and of waiting for data, from steps of 2, 4, 8 ... samples, while `budget`
    seconds are left; the first step, which warms up, is not counted.

    Args:
        budget: seconds; a step is begun only if twice the time of the last one is left.

    Returns:
        (computing, waiting): seconds per sample of the largest step, and seconds per sample until a batch arrived.
    """
    # The run folder is never created: only `step` is called, which writes nothing.
    loop = Loop(task, recipe, Run(Path("plan"), {}), processes, Console(quiet=True))
    loop.train_mode()
    computing, waiting, size = 0.0, 0.0, 2
    deadline = time.perf_counter() + budget
    with closing(task.batches(0, _STEPS)) as batches:
        for i in range(_STEPS):
            begun = time.perf_counter()
            batch = next(batches)
            arrived = time.perf_counter()
            samples = len(first_tensor(batch))
            # Doubling sizes: a large network stops after the first, a small one is measured where its speed has
            # settled.
            size = min(size, samples)
            loop.step(head(batch, size))
            done = time.perf_counter()
            computing = (done - arrived) / size
            # The first wait includes the start of the workers.
            waiting = (arrived - begun) / samples if i else waiting
            size *= 2
            # The next step has twice the samples. The main process decides: the others would wait in the all-reduce.
            if processes.gather(done + 2 * (done - begun) > deadline)[0]:
                break
    return computing, waiting


def run_length(recipe: Recipe, per_epoch: int) -> dict[str, Any]:
    """The fields of a plan that say how long the run is: epochs, steps and steps_per_epoch."""
    steps = total_steps(recipe, per_epoch)
    epochs = recipe.epochs if recipe.steps is None else round(steps / per_epoch, 2)
    return {"epochs": epochs, "steps": steps, "steps_per_epoch": per_epoch}


def rate_curve(recipe: Recipe, per_epoch: int) -> list[list[float]]:
    """The learning rate at 21 steps spread over the run, or at every step of a short one, as [step, rate]."""
    steps = total_steps(recipe, per_epoch)
    marks = [round(i * (steps - 1) / 20) for i in range(21)] if steps > 20 else list(range(steps))
    return [[step, learning_rate(recipe, step, per_epoch)] for step in marks]


def run_time(samples: int, steps: int, computing: float, waiting: float) -> dict[str, float]:
    """The fields of a plan that say how long the run takes, from the seconds per sample of `measure_steps`.

    Args:
        samples: all that the run processes: images, sentence pairs.
    """
    per_step = samples / steps
    return {
        "seconds_per_step": round(computing * per_step, 4),
        "seconds_waiting_for_data": round(waiting * per_step, 4),
        "estimated_seconds": round(samples * (computing + waiting), 1),
    }


def rate_bars(curve: Sequence[Sequence[float]]) -> str:
    """A learning-rate curve of (step, rate) as a row of bars."""
    high = max(rate for _, rate in curve) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * rate / high)] for _, rate in curve)


def time_text(plan: Mapping[str, Any]) -> str:
    """The time of the plan for people."""
    return (
        f"  about {duration(plan['estimated_seconds'])} ({plan['seconds_per_step'] * 1e3:.0f} ms per step, "
        f"{plan['seconds_waiting_for_data'] * 1e3:.0f} ms waiting for data)"
    )
