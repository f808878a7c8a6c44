"""The commands that start runs, each given by a task, and `resume` and `extend`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from patchloom.cli.output import add_command, add_device, is_main_process, print_json
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.tasks.commands import Command, task_commands


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    for task in task_commands():
        for command in task.start:
            parser = add_command(commands, command.name, shared, command.help, command.examples, usage=command.usage)
            parser.description = command.description
            command.add_arguments(parser)
            _add_run_options(parser)
            parser.set_defaults(run=partial(run_command, command), settings=[])
    _add_resume(commands, shared, "resume", "resume an interrupted run exactly where it stopped")
    _add_resume(commands, shared, "extend", "train a run for more epochs", extends=True)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    add_device(group)
    group.add_argument(
        "--out", metavar="RUN", help="run folder (default: a new folder runs/NAME, named after the data)"
    )
    group.add_argument("--strict", action="store_true", help="fail on unreadable files instead of skipping them")
    group.add_argument(
        "--plan", action="store_true", help="print the resolved plan and an estimate of the time, then exit"
    )
    group.add_argument("--log", choices=["wandb"], help="also log to Weights & Biases")
    group.add_argument("--json", action="store_true", help="print the last log record, or the plan, as JSON")


def _add_resume(commands: Any, shared: argparse.ArgumentParser, name: str, text: str, extends: bool = False) -> None:
    example = f"patchloom {name} runs/photos{' --epochs 10' * extends}"
    parser = add_command(commands, name, shared, text, [example])
    parser.add_argument("run_folder", metavar="RUN", help="run folder")
    group = parser.add_argument_group("run")
    if extends:
        group.add_argument("--epochs", type=int, required=True, metavar="N", help="number of epochs to add")
    add_device(group)
    group.add_argument("--json", action="store_true", help="print the last log record as JSON")
    parser.set_defaults(run=run_resume)


def run_command(command: Command, options: argparse.Namespace) -> None:
    """Plan a run, or a sequence of two, and launch it; with --plan only print the plan."""
    from patchloom.devices import choose_device
    from patchloom.runs.sequence import launch

    choose_device(options.device)  # refused before anything is read
    console = _console(options)
    config = command.plan(options)
    if options.plan:
        _print_plan(options, config, console)
        return
    common = {"strict": options.strict, "log": options.log, "console": console, "device": options.device}
    with _out(options) as out:
        if out != options.out:
            console.say(f"The run folder is {out}.")
        run = launch(config, out, **common)
    _print_last(options, run, console)


def _print_plan(options: argparse.Namespace, config: Any, console: Any) -> None:
    from patchloom.runs.plan import measure_plan
    from patchloom.training.processes import leave_processes

    plans = [measure_plan(config, console, options.strict, options.device)]
    if config.then:
        plans.append(measure_plan(config.then.check(config), console, options.strict, options.device))
    leave_processes()
    if options.json and is_main_process():
        # The fields of a single plan are at the top level for every plan, so that programs find them.
        print_json({**plans[0], "stages": plans})


def _out(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """The run folder: that of --out, or a new one."""
    from patchloom.runs.folders import free_folder

    if options.out is not None:
        return nullcontext(options.out)
    # Each process would choose a new folder of its own.
    if "RANK" in os.environ:
        raise PatchloomError("Several processes need --out RUN: they share one folder, also after a restart.")
    return free_folder(options.data)


def run_resume(options: argparse.Namespace) -> None:
    """Resume a run, or with --epochs extend it."""
    from patchloom.runs.sequence import resume

    more = getattr(options, "epochs", 0)
    if more < 0 or (hasattr(options, "epochs") and more == 0):
        raise PatchloomError(f"extend adds at least one epoch, not {more}.")
    console = _console(options)
    _print_last(options, resume(options.run_folder, console, more, options.device), console)


def _console(options: argparse.Namespace) -> Any:
    # With --json standard output holds one JSON value and nothing else.
    return Console(sys.stderr if options.json else sys.stdout, quiet=not is_main_process())


def _print_last(options: argparse.Namespace, run: Any, console: Any) -> None:
    from patchloom.tasks.registry import find_task
    from patchloom.training.processes import leave_processes
    from patchloom.training.report import epoch_records

    leave_processes()
    records = epoch_records(run)
    if options.json and is_main_process():
        print_json(records[-1] if records else None)
    summary = find_task(run.settings["task"]).summary(records[-1]) if records else None
    if summary:
        console.say(summary)
