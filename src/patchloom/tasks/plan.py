"""What a run will do, before it does it: steps, learning rate, and time and memory from a few measured steps."""

from __future__ import annotations

import dataclasses
import resource
import time
from pathlib import Path
from typing import Any

from patchloom.models.complexity import complexity
from patchloom.tasks.job import Job
from patchloom.tasks.prepare import make_task, open_data
from patchloom.training.console import Console, duration
from patchloom.training.loop import Loop
from patchloom.training.processes import join_processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate

_MEASURED = 3


def measure_plan(job: Job, console: Console, strict: bool = False) -> dict[str, Any]:
    """Resolve everything, measure a few steps of the loop, write nothing."""
    recipe, processes = job.recipe, join_processes()
    console.quiet = console.quiet or not processes.first
    for note in job.notes:
        console.say(note)
    if job.teaching is not None:  # writes nothing
        job = dataclasses.replace(job, teaching=dataclasses.replace(job.teaching, cache=None))
    source, split, bad = open_data(job, console, processes, strict)
    task = make_task(job, source, split, processes, console)
    steps = recipe.epochs * task.steps_per_epoch
    loop = Loop(task, recipe, Run(Path("plan"), {}), processes, console)
    seconds, waiting = _measure(loop, min(_MEASURED, steps))
    marks = [round(i * (steps - 1) / 20) for i in range(21)] if steps > 20 else list(range(steps))
    return {
        "model": task.network.config.name,
        "recipe": recipe.name,
        "data": job.data,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "epochs": recipe.epochs,
        "steps": steps,
        "steps_per_epoch": task.steps_per_epoch,
        "images_seen": steps * task.images_per_step,
        "distinct_images_per_epoch": -(-len(split.train) // recipe.repeated_augmentation),
        "training_images": len(split.train),
        "held_out_images": len(split.held_out),
        "skipped": len(bad),
        "params": complexity(task.network).params,
        "lr_curve": [[step, learning_rate(recipe, step, task.steps_per_epoch)] for step in marks],
        "seconds_per_step": round(seconds, 4),
        "seconds_waiting_for_data": round(waiting, 4),
        "estimated_seconds": round(steps * (seconds + waiting), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _measure(loop: Loop, count: int) -> tuple[float, float]:
    """Seconds of computing and of waiting for data, a step; the first step, which warms up, is not counted."""
    computing = waiting = 0.0
    loop.engine.train()
    begun = time.perf_counter()
    for i, batch in enumerate(loop.task.batches(0, count + 1)):
        arrived = time.perf_counter()
        loop.step(batch)
        done = time.perf_counter()
        if i:
            waiting, computing = waiting + arrived - begun, computing + done - arrived
        begun = done
    return computing / count, waiting / count


def plan_text(plan: dict[str, Any]) -> str:
    """The plan for people."""
    curve = plan["lr_curve"]
    high = max(rate for _, rate in curve) or 1.0
    bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * rate / high)] for _, rate in curve)
    return "\n".join(
        [
            f"{plan['model']} ({plan['params'] / 1e6:.2f} million parameters) with {plan['recipe']} on {plan['data']}",
            f"  {plan['training_images']} training images, {plan['held_out_images']} held out, "
            f"{plan['skipped']} skipped",
            f"  {plan['epochs']} epochs of {plan['steps_per_epoch']} steps at batch {plan['batch_size']}: "
            f"{plan['steps']} steps, {plan['images_seen']} images seen",
            f"  learning rate {plan['lr']:.3g} at its peak   {bars}",
            f"  about {duration(plan['estimated_seconds'])} ({plan['seconds_per_step'] * 1e3:.0f} ms a step, "
            f"{plan['seconds_waiting_for_data'] * 1e3:.0f} ms waiting for data), {plan['peak_memory_mb']} MB of memory",
        ]
    )
