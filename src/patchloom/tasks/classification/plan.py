"""The plan of a classification run: sizes, steps and memory without computing, then the time from measured steps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from patchloom.console import Console
from patchloom.data.splits import Split, split_source
from patchloom.models.complexity import complexity
from patchloom.models.config import Config
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images, open_classes, open_images
from patchloom.tasks.classification.setup import make_task
from patchloom.tasks.spec import Context, RunConfig
from patchloom.text import count
from patchloom.training.checks import check_batch
from patchloom.training.measure import measure_steps, rate_bars, rate_curve, run_length, run_time, time_text
from patchloom.training.processes import Processes

_SCAN = 5.0  # seconds for reading images
_BUDGET = 6.0  # seconds for measured steps
_IMAGES = 32  # of the largest measured step
_WORK = 3  # forward and backward, in forward passes


def plan(run: RunConfig, context: Context) -> dict[str, Any]:
    """Print the sizes, measure a few small steps of the loop, and print the time; writes nothing."""
    processes, console = context.processes, context.console
    source = open_classes(run.task, context.opened)
    config = run.task.network_config(run.recipe, len(source.class_names))
    sizes = _sizes(run, config, split_source(source, run.task.splits), processes)
    console.say(*plan_lines(sizes))
    context = replace(context, scan_seconds=math.inf if context.strict else _SCAN, writes=False)
    images = open_images(run.task, run.recipe, context, source)
    check_batch(run.recipe, len(images.split.train), processes.count)
    if images.skipped:
        sizes = _sizes(run, config, images.split, processes)
        console.say(f"Without {count(len(images.skipped), 'unreadable file')}:", *plan_lines(sizes)[1:])
    seconds, waiting = _estimate(config, processes) or _measure(run, images, context)
    # Seconds are measured per image, over all processes.
    sizes |= {"skipped": len(images.skipped), **run_time(sizes["images_seen"], sizes["steps"], seconds, waiting)}
    console.say(time_text(sizes))
    return sizes


def _sizes(run: RunConfig, config: Config, split: Split, processes: Processes) -> dict[str, Any]:
    """All that needs no reading of images and no computing."""
    recipe = run.recipe
    per_step = min(recipe.batch_size, len(split.train))
    per_epoch = max(1, len(split.train) // recipe.batch_size)
    length = run_length(recipe, per_epoch)
    return {
        "model": config.name,
        "recipe": recipe.name,
        "data": run.task.data,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        **length,
        "images_seen": length["steps"] * per_step,
        "distinct_images_per_epoch": -(-len(split.train) // recipe.repeated_augmentation),
        "training_images": len(split.train),
        "held_out_images": len(split.held_out),
        "params": complexity(config).params,
        "lr_curve": rate_curve(recipe, per_epoch),
        "peak_memory_mb": round(_memory(config, recipe, -(-per_step // processes.count // recipe.accumulate)) / 1e6),
    }


def _memory(config: Config, recipe: Recipe, images: int) -> float:
    """Bytes: weights, gradients, the optimizer's state, the average, and what `images` leave for the backward pass,
    which a network without values (torch's meta device) counts without computing."""
    with torch.device("meta"):
        network = build(config).train()
    network.gradient_checkpointing = recipe.gradient_checkpointing
    # From 2 to 4 images the difference is what two images add: constant parts cancel.
    few, more = (_saved_bytes(network, config, count) for count in (2, 4))
    # SGD keeps one moment per parameter, Adam and LAMB two. All in float32, 4 bytes.
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
    # The first product starts threads and libraries; the second is timed.
    a @ a
    begun = time.perf_counter()
    float((a @ a).sum())
    # 1024^3 multiply-adds in one product of that size.
    per_image = _WORK * complexity(config).macs * (time.perf_counter() - begun) / 1024**3
    slow = per_image * 2 > _BUDGET
    return (per_image, 0.0) if processes.gather(slow)[0] else None


def _measure(run: RunConfig, images: Images, context: Context) -> tuple[float, float]:
    """Seconds per image of computing and of waiting for data, with few images per step."""
    batch = min(run.recipe.batch_size, max(_IMAGES, 2 * context.processes.count))
    recipe = run.recipe.replace(batch_size=batch, accumulate=1)
    quiet = replace(context, console=Console(quiet=True))
    return measure_steps(make_task(run.task, recipe, images, quiet), recipe, context.processes, _BUDGET)


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The sizes of the plan for people."""
    return [
        f"{plan['model']} ({plan['params'] / 1e6:.2f} million parameters) with {plan['recipe']} on {plan['data']}",
        f"  {plan['training_images']} training images, {plan['held_out_images']} held out",
        f"  {count(plan['epochs'], 'epoch')} of {count(plan['steps_per_epoch'], 'step')} at batch "
        f"{plan['batch_size']}: {count(plan['steps'], 'step')}, {plan['images_seen']} images seen",
        f"  learning rate {plan['lr']:.3g} at its peak   {rate_bars(plan['lr_curve'])}",
        f"  about {plan['peak_memory_mb']} MB of memory for the network and its batch",
    ]
