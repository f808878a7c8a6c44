"""What a run will do, before it does it: sizes, steps and memory at once, then the time from a few measured steps."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.console import Console, duration
from patchloom.data.sources import Split, count, split_source
from patchloom.devices import Device
from patchloom.models.complexity import complexity
from patchloom.models.config import Config
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.runs.config import Job
from patchloom.tasks.classification.setup import make_task, open_data, source_of
from patchloom.training.loop import Loop, check_batch
from patchloom.training.processes import Processes, join_processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate

_SCAN = 5.0  # seconds for reading images
_BUDGET = 6.0  # seconds for measured steps
_IMAGES = 32  # of the largest measured step
_WORK = 3  # forward and backward, in forward passes


def measure_plan(job: Job, console: Console, strict: bool = False, device: Device = "auto") -> dict[str, Any]:
    """Resolve everything, say it, measure a few small steps of the loop, write nothing."""
    processes = join_processes(device)
    console.quiet = console.quiet or not processes.first
    for note in job.notes:
        console.say(note)
    if job.teaching is not None:  # writes nothing
        job = dataclasses.replace(job, teaching=dataclasses.replace(job.teaching, cache=None))
    source = source_of(job)
    config = job.network_config(len(source.class_names))
    plan = _sizes(job, config, split_source(source, job.splits), processes)
    console.say(*plan_lines(plan))
    usable, split, bad = open_data(job, console, processes, strict, seconds=math.inf if strict else _SCAN)
    check_batch(job.recipe, len(split.train), processes.count)
    if bad:
        plan = _sizes(job, config, split, processes)
        console.say(f"Without {count(len(bad), 'unreadable file')}:", *plan_lines(plan)[1:])
    seconds, waiting = _estimate(config, processes) or _measure(_small_loop(job, usable, split, processes))
    images = plan["images_seen"] // plan["steps"]
    plan |= {
        "skipped": len(bad),
        "seconds_per_step": round(seconds * images, 4),
        "seconds_waiting_for_data": round(waiting * images, 4),
        "estimated_seconds": round(plan["steps"] * images * (seconds + waiting), 1),
    }
    console.say(time_text(plan))
    return plan


def _sizes(job: Job, config: Config, split: Split, processes: Processes) -> dict[str, Any]:
    """All that needs no reading of images and no computing."""
    recipe = job.recipe
    per_step = min(recipe.batch_size, len(split.train))
    per_epoch = max(1, len(split.train) // recipe.batch_size)
    steps = recipe.epochs * per_epoch
    marks = [round(i * (steps - 1) / 20) for i in range(21)] if steps > 20 else list(range(steps))
    return {
        "model": config.name,
        "recipe": recipe.name,
        "data": job.data,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "epochs": recipe.epochs,
        "steps": steps,
        "steps_per_epoch": per_epoch,
        "images_seen": steps * per_step,
        "distinct_images_per_epoch": -(-len(split.train) // recipe.repeated_augmentation),
        "training_images": len(split.train),
        "held_out_images": len(split.held_out),
        "params": complexity(config).params,
        "lr_curve": [[step, learning_rate(recipe, step, per_epoch)] for step in marks],
        "peak_memory_mb": round(_memory(config, recipe, -(-per_step // processes.count // recipe.accumulate)) / 1e6),
    }


def _memory(config: Config, recipe: Recipe, images: int) -> float:
    """Bytes: weights, gradients, the optimizer's state, the average, and what `images` leave for the backward pass,
    which a network without values (torch's meta device) counts without computing."""
    with torch.device("meta"):
        network = build(config).train()
    network.gradient_checkpointing = recipe.gradient_checkpointing
    few, more = (_saved_bytes(network, config, count) for count in (2, 4))
    copies = 2 + (1 if recipe.optimizer == "sgd" else 2) + bool(recipe.ema)
    return 4 * copies * complexity(config).params + max(1, images) * (more - few) / 2


def _saved_bytes(network: Any, config: Config, images: int) -> int:
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        network(torch.zeros(images, config.in_chans, *config.img_size, device="meta"))
    return sum(sizes)


def _estimate(config: Config, processes: Processes) -> tuple[float, float] | None:
    """Seconds per image from the number of operations, for a network that is too slow to measure."""
    a = torch.ones(1024, 1024, device=processes.device)
    a @ a
    begun = time.perf_counter()
    float((a @ a).sum())
    per_image = _WORK * complexity(config).macs * (time.perf_counter() - begun) / 1024**3
    slow = per_image * 2 > _BUDGET
    return (per_image, 0.0) if processes.gather(slow)[0] else None


def _small_loop(job: Job, source: Any, split: Split, processes: Processes) -> Loop:
    """The loop of the job, with few images per step."""
    batch = min(job.recipe.batch_size, max(_IMAGES, 2 * processes.count))
    recipe = dataclasses.replace(job.recipe, batch_size=batch, accumulate=1)
    quiet = Console(quiet=True)
    task = make_task(dataclasses.replace(job, recipe=recipe), source, split, processes, quiet)
    return Loop(task, recipe, Run(Path("plan"), {}), processes, quiet)


def _measure(loop: Loop) -> tuple[float, float]:
    """Seconds per image of computing and of waiting for data, from steps of 2, 4, 8 ... images, while time is left; the
    first step, which warms up, is not counted."""
    loop.engine.train()
    computing, waiting = 0.0, 0.0
    size = min(2, loop.task.images_per_step)
    deadline = time.perf_counter() + _BUDGET
    with closing(loop.task.batches(0, 8)) as batches:
        for i in range(8):
            begun = time.perf_counter()
            batch = next(batches)
            arrived = time.perf_counter()
            loop.step(tuple(tensor[:size] for tensor in batch))
            done = time.perf_counter()
            computing = (done - arrived) / size
            waiting = (arrived - begun) / len(batch[0]) if i else waiting
            size = min(2 * size, len(batch[0]))
            if loop.processes.gather(done + 2 * (done - begun) > deadline)[0]:
                break
    return computing, waiting


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The sizes of the plan for people."""
    curve = plan["lr_curve"]
    high = max(rate for _, rate in curve) or 1.0
    bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * rate / high)] for _, rate in curve)
    return [
        f"{plan['model']} ({plan['params'] / 1e6:.2f} million parameters) with {plan['recipe']} on {plan['data']}",
        f"  {plan['training_images']} training images, {plan['held_out_images']} held out",
        f"  {count(plan['epochs'], 'epoch')} of {count(plan['steps_per_epoch'], 'step')} at batch "
        f"{plan['batch_size']}: {count(plan['steps'], 'step')}, {plan['images_seen']} images seen",
        f"  learning rate {plan['lr']:.3g} at its peak   {bars}",
        f"  about {plan['peak_memory_mb']} MB of memory for the network and its batch",
    ]


def time_text(plan: dict[str, Any]) -> str:
    """The time of the plan for people."""
    return (
        f"  about {duration(plan['estimated_seconds'])} ({plan['seconds_per_step'] * 1e3:.0f} ms per step, "
        f"{plan['seconds_waiting_for_data'] * 1e3:.0f} ms waiting for data)"
    )
