"""`patchloom train`, `resume` and `extend`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.cli.output import print_json, speaks


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "train",
        parents=[shared],
        help="train a model on your images",
        usage="patchloom train DATA --model M --recipe R --out RUN [key=value ...]",
        description="Train a model on your images. Settings are key=value: any field of a recipe (epochs=10), and "
        "options of the model (model.depth=6); img_size is the resolution.",
    )
    parser.add_argument("data", help="class folders, a CSV manifest, 'digits', ...")
    parser.add_argument("--model", required=True, help="a name of `patchloom models`")
    parser.add_argument("--recipe", required=True, help="a name of `patchloom recipes`, such as deit@small")
    parser.add_argument("--out", required=True, help="the run folder")
    parser.add_argument("--labels", help="the label column of a CSV manifest")
    parser.add_argument("--strict", action="store_true", help="unreadable files are an error, not skipped")
    parser.add_argument("--plan", action="store_true", help="say what would be done and how long it takes, and stop")
    parser.add_argument("--log", choices=["wandb"], help="also log there")
    parser.add_argument("--json", action="store_true", help="print the last log record, or the plan, as JSON")
    parser.set_defaults(run=run_train, settings=[])

    parser = commands.add_parser("resume", parents=[shared], help="go on with a run, exactly where it stopped")
    parser.add_argument("run_folder", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print the last log record as JSON")
    parser.set_defaults(run=run_resume)

    parser = commands.add_parser("extend", parents=[shared], help="add epochs to a run")
    parser.add_argument("run_folder", metavar="RUN")
    parser.add_argument("--epochs", type=int, required=True, help="how many to add")
    parser.add_argument("--json", action="store_true", help="print the last log record as JSON")
    parser.set_defaults(run=run_resume)


def run_train(options: argparse.Namespace) -> None:
    from patchloom.recipes.changes import parse_words
    from patchloom.tasks.classify import plan_job, train
    from patchloom.tasks.plan import measure_plan, plan_text
    from patchloom.training.processes import leave_processes

    changes, model_options = parse_words(options.settings)
    if options.plan:
        job = plan_job(options.data, options.model, options.recipe, changes, model_options, options.labels)
        plan = measure_plan(job, _console(options), options.strict)
        leave_processes()
        if speaks():
            print_json(plan) if options.json else print(plan_text(plan))
        return
    run = train(
        options.data,
        model=options.model,
        recipe=options.recipe,
        out=options.out,
        labels=options.labels,
        model_options=model_options,
        strict=options.strict,
        log=options.log,
        console=_console(options),
        **changes,
    )
    _print_last(options, run)


def run_resume(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError
    from patchloom.tasks.classify import resume

    more = getattr(options, "epochs", 0)
    if more < 0 or (hasattr(options, "epochs") and more == 0):
        raise PatchloomError(f"extend adds at least one epoch, not {more}.")
    _print_last(options, resume(options.run_folder, _console(options), more))


def _console(options: argparse.Namespace) -> Any:
    from patchloom.training.console import Console

    return Console(sys.stderr if options.json else sys.stdout)


def _print_last(options: argparse.Namespace, run: Any) -> None:
    from patchloom.training.processes import leave_processes

    leave_processes()
    records = [row for row in run.records() if row.get("event") == "epoch"]
    if options.json and speaks():
        print_json(records[-1] if records else None)
