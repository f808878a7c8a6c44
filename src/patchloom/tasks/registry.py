"""The kinds of learning. Each is a folder of this package whose module `spec` holds its `SPEC`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from patchloom import tasks
from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.spec import TaskSpec


@cache
def task_names() -> tuple[str, ...]:
    """The names of all kinds of learning."""
    # Found by looking into the folder, so that a new task needs no entry here.
    return tuple(sorted(module.name for module in iter_modules(tasks.__path__) if module.ispkg))


def task_specs() -> Iterator[TaskSpec]:
    """Every kind of learning, each imported only when the iteration reaches it."""
    for name in task_names():
        yield import_module(f"patchloom.tasks.{name}.spec").SPEC


def default_task() -> TaskSpec:
    """The task of weights that do not name one."""
    return next(spec for spec in task_specs() if spec.default)


def task_from_python() -> TaskSpec:
    """The kind of runs that are started with Python objects."""
    return next(spec for spec in task_specs() if spec.from_python)


def task_for_recipe(recipe: Recipe) -> TaskSpec:
    """The kind of learning that a recipe is for: the one with its options."""
    for spec in task_specs():
        if spec.options is type(recipe.options):
            return spec
    raise PatchloomError(f"{recipe.name} belongs to no known task: its options are {type(recipe.options).__name__}.")


def find_task(label: object) -> TaskSpec:
    """The kind of learning that a name, or the value of `task` in recipe.yaml, stands for.

    Raises:
        PatchloomError: no kind of learning has this name.
    """
    for spec in task_specs():
        if label == spec.name or label in spec.labels:
            return spec
    known = sorted(label for spec in task_specs() for label in spec.labels)
    raise PatchloomError(f"There is no task {label!r}; known: {', '.join(known)}. A newer version may know it.")
