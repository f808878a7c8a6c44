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
        "evaluate a model on labelled data",
        [
            "patchloom evaluate runs/photos photos/",
            "patchloom evaluate deit_small.fb_in1k imagenet/val --crop-ratio 0.875 1.0",
        ],
        usage="patchloom evaluate FROM DATA [options]",
    )
    # SUPPRESS: an absent positional must not overwrite what an option that takes several words has found
    either: dict[str, Any] = {"nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("model", metavar="FROM", **either, help=f"{MODEL_HELP}, or timm:NAME")
    parser.add_argument("data", metavar="DATA", **either, help="data, as for `patchloom train`")
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--split",
        help="split to evaluate on: train, val, test, several as train+val, or all (default: the one that the run held "
        "out, otherwise val or test)",
    )
    group.add_argument("--batch", type=int, default=128, metavar="N", help="batch size (default: 128)")
    group.add_argument("--workers", type=int, metavar="N", help="number of processes that read data (default: 0)")
    group.add_argument("--strict", action="store_true", help="fail on unreadable files instead of skipping them")
    add_device(group)
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    for task in task_commands():
        task.evaluate.add_arguments(_SharedOptions(parser))  # type: ignore[arg-type]
    parser.set_defaults(run=run_evaluate)

    parser = add_command(
        commands,
        "predict",
        shared,
        "apply a model to new data: the most likely classes of each image",
        ["patchloom predict runs/photos holiday/*.jpg", "patchloom predict runs/photos holiday/ --json"],
        usage="patchloom predict FROM INPUT ... [options]",
    )
    parser.add_argument("model", metavar="FROM", help=MODEL_HELP)
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help="image files, folders or glob patterns")
    group = parser.add_argument_group("prediction")
    add_device(group)
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    for task in task_commands():
        task.predict.add_arguments(_SharedOptions(parser))  # type: ignore[arg-type]
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
    """The commands of the task that a model was trained for.

    Without a model (a comparison of several, for instance) that of the default task.
    """
    from patchloom.tasks.kinds import task_of

    name = task_of(model).name
    return next(task for task in task_commands() if task.task == name)


def run_evaluate(options: argparse.Namespace) -> None:
    # Absent ones were suppressed above, so that the attributes may be missing.
    options.model, options.data = (getattr(options, name, None) for name in ("model", "data"))
    output = _commands_for(options.model).evaluate.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)


def run_predict(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError

    output = _commands_for(options.model).predict.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)
    if output.error is not None:
        raise PatchloomError(output.error)
