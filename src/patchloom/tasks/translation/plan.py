"""What a translation run will do, before it does it: sizes and steps, then the measured time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from patchloom.console import Console
from patchloom.tasks.spec import Context, RunConfig
from patchloom.tasks.translation.setup import open_task
from patchloom.tasks.translation.task import Translation
from patchloom.text import count
from patchloom.training.measure import measure_steps, rate_bars, rate_curve, run_length, run_time, time_text

_BUDGET = 6.0  # seconds for measured steps


def plan(run: RunConfig, context: Context) -> dict[str, Any]:
    """Print the sizes, measure a few small steps of the loop, and print the time; writes nothing."""
    task = open_task(run.task, run.recipe, replace(context, writes=False))
    sizes = _sizes(run, task)
    context.console.say(*plan_lines(sizes))
    task.console = Console(quiet=True)
    seconds, waiting = measure_steps(task, run.recipe.replace(accumulate=1), context.processes, _BUDGET)
    sizes |= run_time(sizes["pairs_seen"], sizes["steps"], seconds, waiting)
    context.console.say(time_text(sizes))
    return sizes


def _sizes(run: RunConfig, task: Translation) -> dict[str, Any]:
    recipe, per_epoch = run.recipe, task.steps_per_epoch
    length = run_length(recipe, per_epoch)
    return {
        "model": task.network.config.name,
        "recipe": recipe.name,
        "data": run.task.data,
        "pair": run.task.pair,
        "lr": recipe.lr,
        "batch_tokens": recipe.batch_tokens,
        "vocabulary": len(task.vocabulary),
        **length,
        "training_pairs": len(task.corpus.train),
        "held_out_pairs": len(task.corpus.held_out),
        "pairs_seen": round(length["steps"] * len(task.corpus.train) / per_epoch),
        "params": sum(parameter.numel() for parameter in task.network.parameters()),
        "lr_curve": rate_curve(recipe, per_epoch),
    }


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The sizes of the plan for people."""
    return [
        f"{plan['model']} ({plan['params'] / 1e6:.2f} million parameters) with {plan['recipe']} on {plan['data']}",
        f"  {plan['pair']}: {plan['training_pairs']} training pairs, {plan['held_out_pairs']} held out, a vocabulary "
        f"of {plan['vocabulary']} tokens",
        f"  {count(plan['epochs'], 'epoch')} of {count(plan['steps_per_epoch'], 'step')} of at most "
        f"{plan['batch_tokens']} tokens: {count(plan['steps'], 'step')}",
        f"  learning rate {plan['lr']:.3g} at its peak   {rate_bars(plan['lr_curve'])}",
    ]
