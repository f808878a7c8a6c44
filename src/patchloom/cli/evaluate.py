"""`patchloom evaluate` and `patchloom predict`, for a model of any kind: its task does the work."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from patchloom.cli.output import JSON_HELP, MODEL_HELP, add_command, add_device, print_json
from patchloom.errors import PatchloomError
from patchloom.tasks.commands import Commands, Tool, task_commands
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
    parser.add_argument(
        "data",
        metavar="DATA",
        **either,
        help="labelled data, in a form that the command that trained the model accepts",
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--split",
        help="split to evaluate on: train, val, test, all, or several joined as train+val (default: the one that the "
        "run held out, otherwise val or test)",
    )
    add_device(group)
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    _add_task_options(parser, {task.task: task.evaluate for task in task_commands()})
    parser.set_defaults(run=run_evaluate)

    parser = add_command(
        commands,
        "predict",
        shared,
        "apply a model to new data, for example to classify images",
        ["patchloom predict runs/photos holiday/*.jpg", "patchloom predict runs/photos holiday/ --json"],
        usage="patchloom predict FROM INPUT ... [options]",
    )
    parser.add_argument("model", metavar="FROM", help=MODEL_HELP)
    parser.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="image files, folders or glob patterns; for translation models, sentences",
    )
    group = parser.add_argument_group("prediction")
    add_device(group)
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    _add_task_options(parser, {task.task: task.predict for task in task_commands()})
    parser.set_defaults(run=run_predict)


def _add_task_options(parser: argparse.ArgumentParser, tools: Mapping[str, Tool]) -> None:
    """The options of every task, and which tasks each of them belongs to."""
    owners: dict[argparse.Action, set[str]] = {}
    for task, tool in tools.items():
        tool.add_arguments(_SharedOptions(parser, task, owners))  # type: ignore[arg-type]
    parser.set_defaults(owners=owners)


class _SharedOptions:
    """A parser that several tasks add options to. An option of several tasks is declared by the first; the others add
    what it means for their models to its help."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        task: str,
        owners: dict[argparse.Action, set[str]],
        group: argparse._ArgumentGroup | None = None,
    ) -> None:
        self.parser, self.task, self.owners, self.group = parser, task, owners, group

    def add_argument_group(self, title: str) -> _SharedOptions:
        return _SharedOptions(self.parser, self.task, self.owners, self.parser.add_argument_group(title))

    def add_argument(self, *flags: str, **options: Any) -> None:
        declared = self.parser._option_string_actions
        # argparse refuses a flag that is declared twice, so the action of the first task serves all.
        action = next((declared[flag] for flag in flags if flag in declared), None)
        meaning = options.get("help") or ""
        if action is None:
            action = (self.group or self.parser).add_argument(*flags, **options)
        elif self.group is not None and action.help and meaning not in action.help:
            action.help += f"; {self.group.title}: {meaning}"
        self.owners.setdefault(action, set()).add(self.task)


def _commands_for(model: str | None) -> Commands:
    """The commands of the task that a model was trained for.

    Without a model (a comparison of several, for instance) that of the default task.
    """
    from patchloom.tasks.kinds import task_of

    name = task_of(model).name
    return next(task for task in task_commands() if task.task == name)


def _check_options(options: argparse.Namespace, task: str) -> None:
    """Refuse an option that only models of other tasks have: it would be ignored."""
    for action, tasks in options.owners.items():
        if task not in tasks and getattr(options, action.dest) != action.default:
            raise PatchloomError(f"{action.option_strings[0]} has no effect on this model: leave it out.")


def run_evaluate(options: argparse.Namespace) -> None:
    # Absent ones were suppressed above, so that the attributes may be missing.
    options.model, options.data = (getattr(options, name, None) for name in ("model", "data"))
    commands = _commands_for(options.model)
    _check_options(options, commands.task)
    output = commands.evaluate.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)


def run_predict(options: argparse.Namespace) -> None:
    commands = _commands_for(options.model)
    _check_options(options, commands.task)
    output = commands.predict.run(options)
    print_json(output.result) if options.json else print_lines(*output.lines)
    if output.error is not None:
        raise PatchloomError(output.error)
