"""What a kind of learning adds to the command line. Importing this loads no torch, so that `--help` is fast.

The module `commands` of a task's folder holds `COMMANDS`, which start runs, and what `patchloom evaluate` and
`patchloom predict` do with its models: `EVALUATE` and `PREDICT`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from patchloom import tasks
from patchloom.errors import PatchloomError


@dataclass(frozen=True)
class Command:
    """A command that starts runs: its arguments, and the run config that it makes of them. One of them is `data`, after
    which the default run folder is named.

    `options.settings` has the key=value words of the command line.
    """

    name: str
    help: str
    usage: str
    description: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    plan: Callable[[argparse.Namespace], Any]  # a RunConfig


@dataclass(frozen=True)
class Output:
    """What a command prints: `result` with --json, `lines` otherwise; then `error`, if there is one, as an error."""

    result: Any
    lines: Sequence[str]
    error: str | None = None


@dataclass(frozen=True)
class Tool:
    """What `evaluate` or `predict` does with models of a kind: its own arguments, and the work."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Output]


@dataclass(frozen=True)
class Commands:
    """All that one kind of learning adds."""

    task: str
    start: tuple[Command, ...]
    evaluate: Tool
    predict: Tool


def add_split_arguments(group: argparse._ArgumentGroup) -> None:
    """The options that say which images are for training and which are held out."""
    group.add_argument(
        "--train-split", metavar="SPLIT", help="split to train on; join several as train+val (default: train)"
    )
    group.add_argument(
        "--test-split", metavar="SPLIT", help="split to evaluate on (default: val, or test if there is no val)"
    )
    group.add_argument(
        "--hold-out",
        metavar="none|FRACTION",
        help="fraction of each class to hold out if the data has no validation split, or none to train on all images "
        "(default: 0.2)",
    )


def splits_of(options: argparse.Namespace) -> Any:
    """The splits that the options of `add_split_arguments` ask for."""
    from patchloom.data.splits import Splits

    return Splits(options.train_split, options.test_split, options.hold_out)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `patchloom evaluate` for models that are evaluated on images."""
    group = parser.add_argument_group("image loading")
    group.add_argument("--batch", type=int, default=128, metavar="N", help="batch size (default: 128)")
    group.add_argument("--workers", type=int, metavar="N", help="number of processes that read images (default: 0)")
    group.add_argument("--strict", action="store_true", help="fail on unreadable files instead of skipping them")


def require_data(options: argparse.Namespace) -> None:
    """Refuse `patchloom evaluate` without a model or without data."""
    if options.model is None or options.data is None:
        raise PatchloomError("evaluate needs a model and data: patchloom evaluate FROM DATA.")


def require_images(options: argparse.Namespace) -> None:
    """Refuse `patchloom predict` without images."""
    if not options.inputs:
        raise PatchloomError("predict needs images: patchloom predict FROM IMAGE ...")


@cache
def task_commands() -> tuple[Commands, ...]:
    """The commands of every kind of learning."""
    folders = sorted(module.name for module in iter_modules(tasks.__path__) if module.ispkg)
    # Only the modules `commands`, which import nothing heavy at their top: torch takes seconds to load.
    found = [(name, import_module(f"patchloom.tasks.{name}.commands")) for name in folders]
    return tuple(Commands(name, module.COMMANDS, module.EVALUATE, module.PREDICT) for name, module in found)
