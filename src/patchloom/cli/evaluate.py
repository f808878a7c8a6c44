"""`patchloom evaluate` and `patchloom predict`, for a model of any kind: its task does the work."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.cli.output import JSON_HELP, MODEL_HELP, add_command, add_device, print_json
from patchloom.tasks.commands import Commands, task_commands
from patchloom.terminal import print_lines


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "evaluate",
        shared,
        "evaluate a model on the data that its run held out, or on any split",
        [
            "patchloom evaluate runs/photos photos/",
            "patchloom evaluate deit_small.fb_in1k imagenet/val --crop-ratio 0.875 1.0",
        ],
        usage="patchloom evaluate FROM DATA [options]",
    )
    # SUPPRESS: an absent positional must not overwrite what an option that takes several words has found
    either: dict[str, Any] = {"nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("model", metavar="FROM", **either, help=MODEL_HELP)
    parser.add_argument("data", metavar="DATA", **either, help="data as for training")
    parser.add_argument(
        "--split",
        help="train, val, test, several as train+val, or all (default: what the run held out, or val, or test)",
    )
    parser.add_argument("--batch", type=int, default=128, help="batch size (default: 128)")
    parser.add_argument("--workers", type=int, help="number of processes that read data (default: 0)")
    parser.add_argument("--strict", action="store_true", help="treat unreadable files as an error, not skip them")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    for task in task_commands():
        task.evaluate.add_arguments(_SharedOptions(parser))  # type: ignore[arg-type]
    add_device(parser)
    parser.set_defaults(run=run_evaluate)

    parser = add_command(
        commands,
        "predict",
        shared,
        "apply a model: a classifier names the most likely classes of each image",
        ["patchloom predict runs/photos holiday/*.jpg", "patchloom predict runs/photos holiday/ --json"],
        usage="patchloom predict FROM INPUT ... [options]",
    )
    parser.add_argument("model", metavar="FROM", help=MODEL_HELP)
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help="files, folders or glob patterns")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    for task in task_commands():
        task.predict.add_arguments(_SharedOptions(parser))  # type: ignore[arg-type]
    add_device(parser)
    parser.set_defaults(run=run_predict)


class _SharedOptions:
    """A parser that several tasks add options to: an option that more than one of them has is declared by the first."""

    def __init__(self, parser: argparse.ArgumentParser, target: Any = None) -> None:
        self.parser, self.target = parser, target or parser

    def add_argument_group(self, title: str) -> _SharedOptions:
        return _SharedOptions(self.parser, self.parser.add_argument_group(title))

    def add_argument(self, *flags: str, **options: Any) -> None:
        if not any(flag in self.parser._option_string_actions for flag in flags):
            self.target.add_argument(*flags, **options)


def _commands_for(model: str | None) -> Commands:
    """The commands of the task that a model was trained for."""
    from patchloom.runs.kinds import task_of

    name = task_of(model)
    return next(task for task in task_commands() if task.task == name)


def run_evaluate(options: argparse.Namespace) -> None:
    options.model, options.data = (getattr(options, name, None) for name in ("model", "data"))
    output = _commands_for(options.model).evaluate.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)


def run_predict(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError

    output = _commands_for(options.model).predict.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)
    if output.error is not None:
        raise PatchloomError(output.error)
