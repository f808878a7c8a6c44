"""What a Grafit run will do, before it does it: sizes, steps and the memory, then the measured time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from patchloom.console import Console
from patchloom.data.order import Order
from patchloom.tasks.retrieval.memory import PRECISIONS
from patchloom.tasks.retrieval.setup import check_batches, images_of, make_task
from patchloom.tasks.retrieval.task import Retrieval
from patchloom.tasks.retrieval.terms import terms_of
from patchloom.tasks.spec import Context, RunConfig
from patchloom.text import count
from patchloom.training.measure import measure_steps, rate_bars, rate_curve, run_length, run_time, time_text

_SCAN = 5.0  # seconds for reading images
_BUDGET = 6.0  # seconds for measured steps
_IMAGES = 32  # of the largest measured step


def plan(run: RunConfig, context: Context) -> dict[str, Any]:
    """Print the sizes, measure a few small steps of the loop, and print the time; writes nothing."""
    context = replace(context, scan_seconds=math.inf if context.strict else _SCAN, writes=False)
    images = images_of(run.task, run.recipe, context)
    check_batches(run.recipe, terms_of(run.recipe, run.task.labelled), images.split, context.processes)
    # One task for both: its networks are those of the run, its batches small enough to be measured.
    batch = min(run.recipe.batch_size, max(_IMAGES, 2 * context.processes.count))
    if run.recipe.clusters is not None and run.task.clusters_from is None:
        # The network whose vectors are clustered is not trained yet: stand-ins take as long to learn.
        stand_ins = [i % run.recipe.clusters for i in range(len(images.split.train))]
        context = replace(context, environment={"clusters": stand_ins})
    # Small steps are enough to measure, and a memory filled by the network would embed all images first.
    recipe = run.recipe.replace(batch_size=batch, accumulate=1, memory_start="random")
    task = make_task(run.task, recipe, images, context)
    sizes = _sizes(run, task)
    context.console.say(*plan_lines(sizes))
    task.console = Console(quiet=True)
    seconds, waiting = measure_steps(task, recipe, context.processes, _BUDGET)
    sizes |= {"skipped": len(images.skipped), **run_time(sizes["images_seen"], sizes["steps"], seconds, waiting)}
    context.console.say(time_text(sizes))
    return sizes


def _sizes(run: RunConfig, task: Retrieval) -> dict[str, Any]:
    recipe, images = run.recipe, len(task.split.train)
    order = Order(images, recipe.batch_size)
    per_epoch = order.steps_per_epoch
    length = run_length(recipe, per_epoch)
    dim = task.network.config.dim
    bytes_each = PRECISIONS[recipe.memory_precision].itemsize
    return {
        "model": task.network.config.trunk.name,
        "recipe": recipe.name,
        "data": run.task.data,
        "losses": list(task.terms.losses),
        "views": task.terms.views,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        **length,
        "images_seen": length["steps"] * order.images_per_step,
        "training_images": images,
        "held_out_images": len(task.split.held_out),
        "params": sum(p.numel() for name in task.trained for p in task.modules[name].parameters()),
        "embedding": dim,
        "memory_mb": round(images * task.memory.dim * bytes_each / 1e6, 1) if task.memory is not None else 0,
        "lr_curve": rate_curve(recipe, per_epoch),
    }


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The sizes of the plan for people."""
    return [
        f"{plan['model']} ({plan['params'] / 1e6:.2f} million parameters with projector and predictor) with "
        f"{plan['recipe']} on {plan['data']}",
        f"  {plan['training_images']} training images, {plan['held_out_images']} held out",
        f"  loss {'+'.join(plan['losses'])}, {count(plan['views'], 'view')} of each image, embeddings of "
        f"{plan['embedding']} dimensions, {plan['memory_mb']} MB of memory for the training images' vectors",
        f"  {count(plan['epochs'], 'epoch')} of {count(plan['steps_per_epoch'], 'step')} at batch "
        f"{plan['batch_size']}: {count(plan['steps'], 'step')}, {plan['images_seen']} images seen",
        f"  learning rate {plan['lr']:.3g} at its peak   {rate_bars(plan['lr_curve'])}",
    ]
