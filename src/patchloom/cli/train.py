"""`patchloom train`, `distill`, `finetune`, `resume` and `extend`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from patchloom.cli.output import is_main_process, print_json


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    run = _run_options()
    teaching = _teaching_options()

    parser = commands.add_parser(
        "train",
        parents=[shared, _model_options(required=False), run],
        help="train a model on your images",
        usage="patchloom train DATA [--model M] [--recipe R] [--out RUN] [key=value ...]",
        description="Train a model on your images. Model and recipe are chosen from the data where they are not given, "
        "and the command that repeats the choice is printed. Settings are key=value: any field of a recipe "
        "(epochs=10), and options of the model (model.depth=6); img_size is the resolution.",
    )
    parser.add_argument("data", metavar="DATA", help="class folders, a CSV manifest, 'digits', ...")
    parser.add_argument(
        "--finish", type=int, metavar="R", help="then fine-tune at R pixels; finish.key=value are its settings"
    )
    parser.add_argument("--finish-recipe", metavar="NAME", help="of the second stage; default: the family's own")
    parser.add_argument(
        "--scales-from",
        metavar="RUN",
        help="begin with the residual scales of another model; model.scale_trainable=false keeps them fixed",
    )
    parser.set_defaults(run=run_train, settings=[])

    parser = commands.add_parser(
        "distill",
        parents=[shared, _model_options(required=True), teaching, run],
        help="train a model on your images and on what a teacher says of them",
        usage="patchloom distill TEACHER DATA --model M --recipe R [--how hard|soft|token] [--out RUN] [key=value ...]",
    )
    parser.add_argument("first_teacher", metavar="TEACHER", help="a run, weights, timm:NAME[:FILE], an .onnx file")
    parser.add_argument("data", metavar="DATA", help="class folders, a CSV manifest, 'digits', ...")
    parser.set_defaults(run=run_train, settings=[])

    parser = commands.add_parser(
        "finetune",
        parents=[shared, teaching, run],
        help="go on from trained weights: another resolution, other classes",
        usage="patchloom finetune FROM DATA [--resolution R] [--tune WHAT] [--out RUN] [key=value ...]",
        description="Go on from trained weights. Settings are key=value, as for train; model.heads=3 says what a bare "
        "file of weights does not, mean= and std= its normalisation, model.head=mlp asks for Grafit's head.",
    )
    parser.add_argument("start", metavar="FROM", help="a run, an export, a file of weights, a published tag")
    parser.add_argument("data", metavar="DATA", help="class folders, a CSV manifest, 'digits', ...")
    parser.add_argument("--recipe", help="default: the family's fine-tuning, or new_classes where the classes are new")
    parser.add_argument("--resolution", type=int, help="another image size")
    parser.add_argument("--tune", help="train all, attention, ffn or head (default: as the recipe says)")
    parser.add_argument("--delta", action="store_true", help="also export only what changed")
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


def _model_options(required: bool) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    default = "" if required else " (default: chosen from the data)"
    options.add_argument("--model", required=required, help=f"a name of `patchloom models`{default}")
    options.add_argument(
        "--recipe", required=required, help=f"a name of `patchloom recipes`, such as deit@small{default}"
    )
    return options


def _run_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--out", metavar="RUN", help="run folder (default: a new one, runs/NAME of the data)")
    options.add_argument("--labels", help="the label column of a CSV manifest")
    options.add_argument("--train-split", metavar="SPLIT", help="train on this split, or several: train+val")
    options.add_argument("--test-split", metavar="SPLIT", help="hold out this split; default: val, or else test")
    options.add_argument(
        "--hold-out",
        metavar="none|FRACTION",
        help="fraction of each class to hold out when the data has no validation split, or none (default: 0.2)",
    )
    options.add_argument("--strict", action="store_true", help="unreadable files are an error, not skipped")
    options.add_argument("--plan", action="store_true", help="say what would be done and how long it takes, and stop")
    options.add_argument("--log", choices=["wandb"], help="also log there")
    options.add_argument("--json", action="store_true", help="print the last log record, or the plan, as JSON")
    return options


def _teaching_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--teacher", action="append", default=[], help="a teacher; several are averaged")
    options.add_argument(
        "--how", help="hard, soft or token: the form of distillation (default: token for DeiT, hard for other families)"
    )
    options.add_argument("--weight", type=float, help="of the teacher's term (default: 0.1 for soft, 0.5 otherwise)")
    options.add_argument("--tau", type=float, help="temperature of soft distillation (default: 3)")
    options.add_argument("--kl", help="paper (the default) or published: the form of soft distillation")
    options.add_argument("--cache", metavar="DIR", help="keep there what the teachers say")
    return options


def run_train(options: argparse.Namespace) -> None:
    from patchloom.runs import sequence as stages
    from patchloom.runs.launch import carry_out
    from patchloom.runs.plan import measure_plan
    from patchloom.training.processes import leave_processes

    finish, console = _finish(options), _console(options)
    chosen = _choose(options)
    job = _job(options)
    if options.plan:
        console.say(*chosen)
        plan = measure_plan(job, console, options.strict)
        plans = [plan, *([measure_plan(finish.plan(job), console, options.strict)] if finish else [])]
        leave_processes()
        if options.json and is_main_process():
            print_json({**plan, "stages": plans})
        return
    common = {"strict": options.strict, "log": options.log, "console": console}
    with _out(options) as out:
        console.say(*chosen, *([] if out == options.out else [f"The run folder is {out}."]))
        run = stages.carry_out(job, finish, out, **common) if finish else carry_out(job, out, **common)
    _print_last(options, run, console)


def _choose(options: argparse.Namespace) -> list[str]:
    """Choose the model and the recipe that are not given, and say so with the command that repeats the choice."""
    from patchloom.tasks.classification.defaults import choose

    if hasattr(options, "start") or (options.model and options.recipe):
        return []
    choice = choose(options.data, options.labels, options.model, options.recipe)
    added = [name for name in ("model", "recipe") if getattr(options, name) is None]
    words = [word for name in added for word in (f"--{name}", getattr(choice, name))]
    named = {word.partition("=")[0] for word in options.settings}
    settings = [word for word in choice.settings if word.partition("=")[0] not in named]
    options.model, options.recipe = choice.model, choice.recipe
    options.settings = [*options.settings, *settings]
    return [
        f"Chosen: {choice.model} with the recipe {choice.recipe}, for {choice.reason}. The same again:",
        f"  {shlex.join(['patchloom', *options.words, *words, *settings])}",
    ]


def _out(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """The run folder: that of --out, or a new one."""
    from patchloom.errors import PatchloomError
    from patchloom.tasks.classification.defaults import free_folder

    if options.out is not None:
        return nullcontext(options.out)
    if "RANK" in os.environ:
        raise PatchloomError("Several processes need --out RUN: they share one folder, also after a restart.")
    return free_folder(options.data)


def _finish(options: argparse.Namespace) -> Any:
    """The second stage, if one is asked for; its words leave the settings."""
    from patchloom.errors import PatchloomError
    from patchloom.recipes.changes import parse_words
    from patchloom.runs.sequence import Finish

    words = [word for word in options.settings if word.startswith("finish.")]
    options.settings = [word for word in options.settings if word not in words]
    resolution = getattr(options, "finish", None)
    if resolution is None:
        if words or getattr(options, "finish_recipe", None):
            raise PatchloomError(f"{(*words, '--finish-recipe')[0]} is for a second stage: --finish R asks for one.")
        return None
    changes, model_options = parse_words(word.removeprefix("finish.") for word in words)
    if model_options or "resolution" in changes:
        raise PatchloomError("The second stage has the network of the first, at the size of --finish.")
    return Finish(resolution, changes, options.finish_recipe)


def _job(options: argparse.Namespace) -> Any:
    from patchloom.data.sources import Splits
    from patchloom.errors import PatchloomError
    from patchloom.recipes.changes import parse_words
    from patchloom.runs.config import plan_job
    from patchloom.tasks.classification.train import plan_finetune

    start, teaching = getattr(options, "start", None), _teaching(options)
    splits = Splits(options.train_split, options.test_split, options.hold_out)
    changes, model_options = parse_words(options.settings, () if start is None else ("mean", "std"))
    if start is None:
        return plan_job(
            options.data, options.model, options.recipe, changes, model_options, options.labels,
            teaching=teaching, scales_from=getattr(options, "scales_from", None), splits=splits,
        )  # fmt: skip
    asked = options.resolution
    if asked is not None and changes.setdefault("resolution", asked) != asked:
        raise PatchloomError(f"--resolution {asked} and resolution={changes['resolution']}: which?")
    mean, std = changes.pop("mean", None), changes.pop("std", None)
    return plan_finetune(
        start, options.data, options.recipe, changes, model_options,
        tune=options.tune, delta=options.delta, mean=mean, std=std, teaching=teaching, labels=options.labels,
        splits=splits,
    )  # fmt: skip


def _teaching(options: argparse.Namespace) -> Any:
    """Who teaches, if anybody; their words (teacher.heads=3) leave the settings."""
    from patchloom.errors import PatchloomError
    from patchloom.recipes.changes import parse_words
    from patchloom.tasks.classification.train import make_teaching

    teachers = [name for name in (getattr(options, "first_teacher", None), *getattr(options, "teacher", [])) if name]
    given = {name: getattr(options, name, None) for name in ("how", "weight", "tau", "kl", "cache")}
    fields = {name: value for name, value in given.items() if value is not None}
    words = [word for word in options.settings if word.startswith("teacher.")]
    if not teachers:
        if fields or words:
            raise PatchloomError(f"{next((f'--{name}' for name in fields), *words[:1])} is for a --teacher.")
        return None
    options.settings = [word for word in options.settings if word not in words]
    colours = [word.removeprefix("teacher.") for word in words if word.startswith(("teacher.mean=", "teacher.std="))]
    others = [
        f"model.{word.removeprefix('teacher.')}" for word in words if word.removeprefix("teacher.") not in colours
    ]
    normal, hints = parse_words([*colours, *others], ("mean", "std"))
    return make_teaching(teachers, **fields, hints={**normal, **hints})


def run_resume(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError
    from patchloom.runs.sequence import resume

    more = getattr(options, "epochs", 0)
    if more < 0 or (hasattr(options, "epochs") and more == 0):
        raise PatchloomError(f"extend adds at least one epoch, not {more}.")
    console = _console(options)
    _print_last(options, resume(options.run_folder, console, more), console)


def _console(options: argparse.Namespace) -> Any:
    from patchloom.console import Console

    return Console(sys.stderr if options.json else sys.stdout, quiet=not is_main_process())


def _print_last(options: argparse.Namespace, run: Any, console: Any) -> None:
    from patchloom.tasks.classification.metrics import interval_text
    from patchloom.training.processes import leave_processes

    leave_processes()
    records = [row for row in run.records() if row.get("event") == "epoch"]
    if options.json and is_main_process():
        print_json(records[-1] if records else None)
    if records and "top1_interval" in records[-1]:
        console.say(f"Top-1 on held-out images: {interval_text(records[-1])}.")
