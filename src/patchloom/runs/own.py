"""Runs of tasks that exist as Python objects: begun, or continued where the folder holds them already."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.console import Console, choose_console
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.recipes.changes import apply_changes
from patchloom.recipes.options import Options
from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.recipes.registry import choose_recipe
from patchloom.runs.config import settings_of
from patchloom.runs.launch import check_free, check_out, continue_task, start_task
from patchloom.tasks.registry import task_from_python
from patchloom.tasks.spec import RunConfig
from patchloom.training.callbacks import Callback
from patchloom.training.loggers import check_log
from patchloom.training.loop import Loop
from patchloom.training.processes import Processes, join_processes
from patchloom.training.run import Run
from patchloom.training.task import Task
from patchloom.weights.files import kept_checkpoints

_CONTINUE = "Run the script that started it again to continue."


def fit(
    task: Task,
    *,
    out: str | PathLike[str],
    recipe: str | Recipe,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Train a task of your own. If `out` holds a run of it already, that run is continued, to the bit.

    Args:
        task: A `patchloom.Task` of yours.
        out: The run folder.
        recipe: The name of a recipe or a Recipe: duration, optimizer, schedule, precision.
        callbacks: `patchloom.Callback` objects, called after steps and evaluations.
        changes: Fields of the recipe (epochs=10).

    Raises:
        PatchloomError: not a task, unknown settings, or the folder holds another run.
        InterruptedWork: a signal ended the run; the same script continues it.
    """
    if not isinstance(task, Task):
        raise PatchloomError(f"fit trains a patchloom.Task, not {type(task).__name__}.")
    resolved = _resolve_recipe(recipe, changes)
    processes, console = join_processes(device), choose_console(console)
    return run_task(task, resolved, out, processes, console, log, callbacks)


def _resolve_recipe(recipe: str | Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe by its name or as it is, with changes. Those of a task's options, such as mixup, would change nothing:
    a task of the user's own has its own."""
    chosen = choose_recipe(recipe)
    of_options = set(setting_types(type(chosen.options))) - set(setting_types(Options))
    if unused := sorted(of_options & set(changes)):
        raise PatchloomError(f"{', '.join(unused)} has no effect with a task of your own: leave it out.")
    return apply_changes(chosen, changes)[0]


def earlier_environment(out: str | PathLike[str]) -> dict[str, Any] | None:
    """environment.json of a run that is in the folder already."""
    check_out(out)
    return Run.open(Path(out)).environment() if (Path(out) / "recipe.yaml").exists() else None


def has_checkpoint(out: str | PathLike[str]) -> bool:
    """Whether the run in a folder has saved anything yet."""
    return bool(kept_checkpoints(Path(out) / "checkpoints"))


def run_task(
    task: Task,
    recipe: Recipe,
    out: str | PathLike[str],
    processes: Processes,
    console: Console,
    log: str | None = None,
    callbacks: Sequence[Callback] = (),
    config: Any = None,
) -> Run:
    """Begin or continue the run of a task in the folder `out`; `config` is what recipe.yaml holds of it."""
    console.quiet = console.quiet or not processes.is_main_process
    check_log(log)
    # Before the loop asks for batches: shares depend on it.
    task.processes = processes
    spec = task_from_python()
    config = config or spec.config_from_json({"data": "own data", "model": {"name": type(task).__name__}})
    settings = {**settings_of(RunConfig(spec, config, recipe)), "log": log}
    if earlier_environment(out) is None:
        check_free(out)
        run = Run(Path(out), settings)
        run.own_continuation = _CONTINUE
        return start_task(run, Loop(task, recipe, run, processes, console, callbacks))
    run = Run.open(Path(out))
    if run.settings.get("task") != config.label:
        raise PatchloomError(f"{run.folder} holds another run: give another folder for this one.")
    # A script can be edited between two starts: the same bytes are only possible with the same settings.
    if edited := run.differences(settings):
        raise PatchloomError(f"{run.folder} holds a run with other settings: {'; '.join(edited)}. Give another folder.")
    loop = Loop(task, recipe, run, processes, console, callbacks)  # refuses a task whose environment is not JSON
    # Of an own dataset only lengths and class names are compared: see `OwnSource.fingerprint`. As JSON gives it back:
    # a tuple has become a list in the file.
    if run.environment()["data"] != json.loads(json.dumps(task.environment()["data"])):
        raise PatchloomError(f"The data has changed since {run.folder} began: exact resuming needs the same.")
    run.own_continuation = _CONTINUE
    console.say(f"Continuing the run in {run.folder}.")
    return continue_task(run, loop, settings)
