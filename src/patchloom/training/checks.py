"""What the loop refuses before it trains: tasks that break the contract of `Task`, and batches too small to share."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.text import describe
from patchloom.training.callbacks import Callback
from patchloom.training.processes import Processes
from patchloom.training.state import RESERVED, check_storable
from patchloom.training.task import Metric, Task

_CALLED_OF_TASK = {
    "batches": ("start", "end"),
    "weight": ("batch",),
    "losses": ("batch", "step", "part"),
    "after_step": ("step",),
    "evaluate": ("modules", "after_batch"),
    "finish": ("run", "result"),
    "load_state": ("state",),
}
_OF_RECORDS = ("event", "epoch", "step", "lr", "train_loss", "losses", "time")  # what the loop adds to log.jsonl
_CALLED_WITH = {"after_step": ("step", "losses"), "after_evaluation": ("record",)}  # methods of `Callback`


def check_setup(task: Task, recipe: Recipe, callbacks: Sequence[Callback]) -> None:
    """Refuse a task, callbacks or settings of the recipe that the loop cannot work with."""
    check_task(task)
    check_callbacks(callbacks)
    check_parameters(task)
    check_storable(task.modules.state_dict())
    check_described(task)
    supported = any(hasattr(module, "gradient_checkpointing") for module in task.modules.values())
    if recipe.gradient_checkpointing and not supported:
        raise PatchloomError(
            f"gradient_checkpointing=true has no effect: no module of {type(task).__name__} supports it. Leave it out."
        )


def check_task(task: Task) -> None:
    """Refuse a task whose modules, module names or number of steps break the contract of `Task`.

    Called before anything is moved, wrapped or copied, so that the message names the attribute, not a line in torch.
    """
    name = type(task).__name__
    for member in ("modules", "steps_per_epoch"):
        if not hasattr(task, member):
            raise PatchloomError(f"The task {name} does not set {member}: set self.{member} in its __init__.")
    for method in ("batches", "losses", "evaluate"):
        if getattr(type(task), method) is getattr(Task, method):
            raise PatchloomError(f"The task {name} does not define the method {method}, which every task needs.")
    for method, arguments in _CALLED_OF_TASK.items():
        _check_callable(getattr(task, method), f"{method} of the task {name}", arguments)
    if not isinstance(task.modules, nn.ModuleDict) or not task.modules:
        raise PatchloomError(f"modules of the task {name} must be a non-empty torch.nn.ModuleDict.")
    if taken := set(RESERVED) & set(task.modules):
        raise PatchloomError(f"Modules of the task {name} cannot be called {', '.join(sorted(taken))}.")
    for what, names in (("trained", task.trained), ("averaged", task.averaged)):
        if isinstance(names, str):
            raise PatchloomError(f"{what} of the task {name} is a tuple of names, ({names!r},), not {names!r} alone.")
        if not isinstance(names, Collection):
            raise PatchloomError(f"{what} of the task {name} is a tuple of names, not {describe(names)}.")
        if not all(isinstance(one, str) for one in names):
            raise PatchloomError(f"{what} of the task {name} is a tuple of names, and one of them is not a string.")
        if unknown := set(names) - set(task.modules):
            raise PatchloomError(f"{what} of the task {name} names {', '.join(sorted(unknown))}, not among modules.")
    if not isinstance(task.steps_per_epoch, int):
        found = f"{task.steps_per_epoch!r} ({describe(task.steps_per_epoch)})"
        raise PatchloomError(f"steps_per_epoch of the task {name} is {found}; it must be a Python int.")
    if task.steps_per_epoch < 1:
        raise PatchloomError(
            f"steps_per_epoch of the task {name} is {task.steps_per_epoch!r}; it must be at least 1. Is there less "
            "data than one batch?"
        )
    if task.metric is not None and not isinstance(task.metric, Metric):
        raise PatchloomError(f"metric of the task {name} is a patchloom.Metric, not {task.metric!r}.")
    if not isinstance(task.unit, str):
        raise PatchloomError(f"unit of the task {name} is a word such as 'images', not {task.unit!r}.")


def check_parameters(task: Task) -> None:
    """Refuse modules without anything to train, or whose parameters have no values yet."""
    parameters = [parameter for name in task.trained for parameter in task.modules[name].parameters()]
    if any(is_lazy(parameter) or parameter.is_meta for parameter in parameters):
        raise PatchloomError(
            "The model has parameters without values (lazy modules, or the device meta): initialise them first, lazy "
            "ones by calling the model once."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise PatchloomError("The model has nothing to train: none of its parameters has requires_grad=True.")


def check_described(task: Task) -> None:
    """Refuse metadata and an environment that JSON cannot hold."""
    for method in ("metadata", "environment"):
        what, value = f"{method} of the task {type(task).__name__} returns", getattr(task, method)()
        if not isinstance(value, dict):
            raise PatchloomError(f"{what} {describe(value)}; it must return a dict.")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise PatchloomError(f"{what} a value that JSON cannot hold ({error}): return plain values.") from error
        if method == "environment" and not isinstance(value.get("data"), Mapping):
            raise PatchloomError(f"{what} no dict under 'data', which says what the run learns from: {{'data': {{}}}}.")


def check_weight(task: Task, weight: Any) -> float:
    """What `Task.weight` returned, if batches can be counted with it."""
    single = isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.numel() == 1)
    number = float(weight) if single else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise PatchloomError(
            f"weight of the task {type(task).__name__} returns {weight!r}; it must return a number of 0 or more."
        )
    return number


def check_metrics(task: Task, metrics: Any) -> dict[str, Any]:
    """What `Task.evaluate` returned, if log.jsonl can hold it and the metric of the task is among it.

    Without held-out samples it may be empty: then the newest checkpoint counts as the best.
    """
    name = type(task).__name__
    if not isinstance(metrics, dict):
        raise PatchloomError(f"evaluate of the task {name} returns {describe(metrics)}; it must return a dict.")
    try:
        json.dumps(metrics)
    except (TypeError, ValueError) as error:
        raise PatchloomError(
            f"evaluate of the task {name} returns a value that JSON cannot hold ({error}): return Python numbers, as "
            "float(tensor) gives them."
        ) from error
    if wrong := [key for key in metrics if not isinstance(key, str) or key in _OF_RECORDS]:
        raise PatchloomError(
            f"evaluate of the task {name} returns a metric called {wrong[0]!r}: give it another name, a text that is "
            f"not one of {', '.join(_OF_RECORDS)}."
        )
    numbers = [key for key, value in metrics.items() if isinstance(value, int | float)]
    wanted = task.metric.name if task.metric is not None else None
    if wanted is not None and wanted not in numbers and (numbers or wanted in metrics):
        raise PatchloomError(
            f"The metric {wanted!r} of the task {name} is not among the numbers that evaluate returns: "
            f"{', '.join(numbers) or 'there is none'}."
        )
    return metrics


def check_losses(task: Task, losses: Any) -> dict[str, Tensor]:
    """What `Task.losses` returned, if it is a dict of tensors with gradients."""
    name = type(task).__name__
    if not isinstance(losses, dict) or not losses:
        raise PatchloomError(f"losses of the task {name} returns {describe(losses)}; it must return a dict of tensors.")
    for key, value in losses.items():
        if not isinstance(key, str):
            raise PatchloomError(f"losses of the task {name} has the name {key!r}; it must be a text.")
        if not isinstance(value, Tensor) or value.is_complex():
            raise PatchloomError(
                f"losses of the task {name} has {describe(value)} under {key!r}; it must be a tensor of real numbers."
            )
    if not any(value.requires_grad for value in losses.values()):
        raise PatchloomError(
            "The loss does not depend on the trained parameters, so it has no gradient: it is computed without one "
            "(detach, argmax, no_grad)."
        )
    return losses


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse anything but callbacks."""
    if not isinstance(callbacks, list | tuple):
        raise PatchloomError(f"callbacks is a list of patchloom.Callback objects, not {describe(callbacks)}.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise PatchloomError(f"A callback must be a patchloom.Callback, not {type(callback).__name__}.")
        for method, arguments in _CALLED_WITH.items():
            _check_callable(getattr(callback, method), f"{method} of the callback {type(callback).__name__}", arguments)


def _check_callable(method: Any, name: str, arguments: tuple[str, ...]) -> None:
    """Refuse a method that cannot take these arguments, before hours of training."""
    try:
        # Bound, not called: a callback may write files or stop the run.
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise PatchloomError(f"{name} takes ({', '.join(arguments)}): {error}.") from error


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


def check_batch(recipe: Recipe, samples: int, processes: int) -> None:
    """Refuse batches that cannot be shared by the processes and the parts of an accumulated step.

    Args:
        samples: how many there are to train on; fewer than a batch are one batch.
    """
    if (batch := min(recipe.batch_size, samples)) < processes * recipe.accumulate:
        raise PatchloomError(
            f"A batch of {batch} samples cannot be shared by {processes} processes with accumulate={recipe.accumulate}."
        )
