"""What a kind of learning gives to the rest of the package: one `TaskSpec`, found by its name in the registry.

A spec says how a run of its kind is configured, planned, opened, evaluated and described; `runs/` works with any spec
and names none. Its commands are in `patchloom.tasks.commands`, which the command line imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from patchloom.console import Console
from patchloom.recipes.options import Options
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.opened import Opened
from patchloom.training.processes import Processes
from patchloom.training.task import Metric, Task


class TaskConfig(Protocol):
    """The settings of a task as plain values: data, model, and fields of its own. recipe.yaml holds them."""

    @property
    def label(self) -> str:
        """The value of `task` in recipe.yaml: the name of the command, such as "finetune"."""
        ...

    @property
    def data(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run: the kind of learning with its config, and the recipe. `notes` are printed once; `opened`
    spares `open` what the plan has opened already, and decides nothing."""

    spec: TaskSpec
    task: Any  # a TaskConfig of the spec's own type
    recipe: Recipe
    notes: tuple[str, ...] = ()
    opened: Opened = field(default_factory=Opened, compare=False, repr=False)


@dataclass(frozen=True)
class Context:
    """What a task needs when it is opened: processes, console, and the records of a run that is resumed."""

    processes: Processes
    console: Console
    strict: bool = False  # unreadable files are an error
    environment: Mapping[str, Any] | None = None  # environment.json of a run that is resumed
    from_checkpoint: bool = False  # the weights come from a checkpoint, so no others are loaded
    scan_seconds: float = float("inf")  # for reading images to find damaged ones
    writes: bool = True  # False: a plan, which leaves no file
    opened: Opened = field(default_factory=Opened)  # by the plan of the run


class RunSequence(Protocol):
    """Two runs, one after the other: `second` depends on the weights of the first."""

    @property
    def folder(self) -> str:
        """The name of the first run's folder, in that of the second."""
        ...

    def check(self, first: RunConfig) -> RunConfig:
        """The config of the second run before its weights exist; raises PatchloomError if it cannot be built."""
        ...

    def second(self, first: RunConfig, weights: Path) -> RunConfig: ...

    def describe(self) -> str:
        """What the second run is, in a few words."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TaskSpec:
    """A kind of learning.

    To add a kind of learning, add a folder with `spec.py` (its `SPEC`) and `commands.py`; `training`, `data`,
    `inference`, `runs` and `cli` never name it. See docs/architecture.md.
    """

    name: str  # of its folder
    labels: tuple[str, ...]  # values of `task` in recipe.yaml
    options: type[Options]  # of its recipes
    metric: Metric
    config_from_json: Callable[[Mapping[str, Any]], Any]
    open: Callable[[Any, Recipe, Context], Task]  # a TaskConfig with its recipe, as a task of the loop
    plan: Callable[[RunConfig, Context], dict[str, Any]]  # sizes, steps and measured time; writes nothing
    evaluate: Callable[..., dict[str, Any]]  # (model, data, **options): metrics
    predict: Callable[..., list[dict[str, Any]]]  # (model, inputs, **options): one row per input
    from_python: bool = False  # runs of Python objects, which no command can rebuild
    network_kind: str | None = None  # `kind` in the configs of networks that only this task can apply, such as "text"
    default: bool = False  # true for one: weights that do not name their task belong to it
    show: Callable[..., Path] | None = None  # (data, recipe, out, ...): a picture of what training sees
    upgrade: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: settings  # of earlier versions
    sequence_from_json: Callable[[Mapping[str, Any]], RunSequence] | None = None
    summary: Callable[[Mapping[str, Any]], str | None] = lambda _: None  # one sentence from a log record
    curves: tuple[str, ...] = field(default=("train_loss", "loss"))  # names in log.jsonl that a list of runs draws
