"""What the loop refuses before it trains: tasks that break the contract of `Task`, and batches too small to share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.training.callbacks import Callback
from patchloom.training.processes import Processes
from patchloom.training.state import RESERVED
from patchloom.training.task import Task


def check_task(task: Task) -> None:
    """Refuse a task whose modules, module names or number of steps break the contract of `Task`.

    Called before anything is moved, wrapped or copied, so that the message names the attribute, not a line in torch.
    """
    name = type(task).__name__
    if not isinstance(task.modules, nn.ModuleDict) or not task.modules:
        raise PatchloomError(f"modules of the task {name} must be a non-empty torch.nn.ModuleDict.")
    if taken := set(RESERVED) & set(task.modules):
        raise PatchloomError(f"Modules of the task {name} cannot be called {', '.join(sorted(taken))}.")
    for what, names in (("trained", task.trained), ("averaged", task.averaged)):
        if unknown := set(names) - set(task.modules):
            raise PatchloomError(f"{what} of the task {name} names {', '.join(sorted(unknown))}, not among modules.")
    if not isinstance(task.steps_per_epoch, int) or task.steps_per_epoch < 1:
        raise PatchloomError(
            f"steps_per_epoch of the task {name} is {task.steps_per_epoch!r}; it must be at least 1. Is there less "
            "data than one batch?"
        )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse anything but callbacks."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise PatchloomError(f"A callback must be a patchloom.Callback, not {type(callback).__name__}.")


def check_equal_states(task: Task, processes: Processes) -> None:
    """Refuse a `Task.state` that differs between processes; every process calls it."""
    # A sum in double precision, not the tensor: a memory of embeddings is too large to gather from every process.
    sums = {name: float(tensor.detach().cpu().double().sum()) for name, tensor in task.state().items()}
    others = processes.gather(sums)
    if different := [name for name in sums if any(other.get(name) != sums[name] for other in others)]:
        raise PatchloomError(
            f"state() of {type(task).__name__} differs between processes in {', '.join(different)}: gather it "
            "there, and share it out in load_state."
        )


def check_batch(recipe: Recipe, images: int, processes: int) -> None:
    """Refuse batches that cannot be shared by the processes and the parts of an accumulated step."""
    if min(recipe.batch_size, images) < processes * recipe.accumulate:
        raise PatchloomError(
            f"A batch of {min(recipe.batch_size, images)} images cannot be shared by {processes} processes with "
            f"accumulate={recipe.accumulate}."
        )
