"""`patchloom train`, `distill` and `finetune`. Heavy imports are inside the functions."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.tasks.classification.evaluate_command import EVALUATE, PREDICT
from patchloom.tasks.commands import Command, add_split_arguments, splits_of

__all__ = ["COMMANDS", "EVALUATE", "PREDICT"]

_DATA = "folder with one subfolder per class, CSV file, 'digits', or another source (see docs/data.md)"
_WEIGHTS = "run folder, exported model, checkpoint, weight file, published tag or timm:NAME"


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help=_DATA)
    model = _add_model(parser, required=False)
    _add_splits(parser)
    sequence = parser.add_argument_group("fine-tuning afterwards")
    sequence.add_argument(
        "--finish",
        type=int,
        metavar="R",
        help="after training, fine-tune at R pixels; finish.key=value changes its settings",
    )
    sequence.add_argument(
        "--finish-recipe",
        metavar="NAME",
        help="recipe of this fine-tuning (default: the fine-tuning recipe of the family)",
    )
    model.add_argument(
        "--scales-from",
        metavar="RUN",
        help="initialise the residual scales from another model; model.scale_trainable=false keeps them fixed",
    )


def _add_distill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first_teacher",
        metavar="TEACHER",
        help="run folder, weight file, published tag, timm:NAME[:FILE] or .onnx file",
    )
    parser.add_argument("data", metavar="DATA", help=_DATA)
    _add_model(parser, required=True)
    _add_distillation(parser)
    _add_splits(parser)


def _add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("start", metavar="FROM", help=_WEIGHTS)
    parser.add_argument("data", metavar="DATA", help=_DATA)
    group = parser.add_argument_group("fine-tuning")
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe name (default: the fine-tuning recipe of the family, or new_classes for new classes)",
    )
    group.add_argument("--resolution", type=int, metavar="R", help="image size in pixels (default: that of the model)")
    group.add_argument(
        "--tune", metavar="PART", help="parameters to train: all, attention, ffn or head (default: set by the recipe)"
    )
    group.add_argument("--delta", action="store_true", help="also export a delta, a file with only the changed tensors")
    _add_distillation(parser)
    _add_splits(parser)


def _add_model(parser: argparse.ArgumentParser, required: bool) -> argparse._ArgumentGroup:
    default = "" if required else " (default: chosen from the data)"
    group = parser.add_argument_group("model and recipe")
    group.add_argument(
        "--model", required=required, metavar="NAME", help=f"model name, see `patchloom models`, or timm:NAME{default}"
    )
    group.add_argument(
        "--recipe",
        required=required,
        metavar="NAME",
        help=f"recipe name such as deit@small, see `patchloom recipes`{default}",
    )
    return group


def _add_splits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--labels", metavar="COLUMN", help="label column of a CSV file")
    add_split_arguments(group)


def _add_distillation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="TEACHER",
        help="teacher to learn from, repeatable; the probabilities of several are averaged",
    )
    group.add_argument(
        "--method", help="distillation method: hard, soft or token (default: token for DeiT, hard for other families)"
    )
    group.add_argument("--how", dest="method", help=argparse.SUPPRESS)  # its earlier name
    group.add_argument(
        "--weight", type=float, help="weight of the teacher's loss (default: 0.1 for soft, 0.5 otherwise)"
    )
    group.add_argument("--tau", type=float, help="temperature of soft distillation (default: 3)")
    group.add_argument(
        "--kl",
        help="KL term of soft distillation: paper (Equation 3.2) or published (the authors' code) (default: paper)",
    )
    group.add_argument("--cache", metavar="DIR", help="save the teachers' logits in DIR and reuse them")


def _plan_train(options: argparse.Namespace) -> Any:
    import dataclasses

    from patchloom.tasks.opened import Opened

    finish, opened = _finish(options), Opened()
    chosen = _choose(options, opened)
    plan = _plan_from_scratch(options)
    return dataclasses.replace(plan, notes=(*chosen, *plan.notes), opened=opened, then=finish)


def _plan_from_scratch(options: argparse.Namespace) -> Any:
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.options import ClassificationOptions
    from patchloom.tasks.classification.plans import plan_training

    distillation = _distillation(options)
    changes, model_options = parse_words(options.settings, ClassificationOptions)
    return plan_training(
        options.data, options.model, options.recipe, changes, model_options, options.labels,
        distillation=distillation, scales_from=getattr(options, "scales_from", None), splits=splits_of(options),
    )  # fmt: skip


def _plan_finetune(options: argparse.Namespace) -> Any:
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.options import ClassificationOptions
    from patchloom.tasks.classification.plans import plan_finetuning

    distillation, asked = _distillation(options), options.resolution
    changes, model_options = parse_words(options.settings, ClassificationOptions, ("mean", "std"))
    # --resolution R is short for resolution=R; both are fine if they agree.
    if asked is not None and changes.setdefault("resolution", asked) != asked:
        raise PatchloomError(f"--resolution {asked} and resolution={changes['resolution']} differ: give one of them.")
    mean, std = changes.pop("mean", None), changes.pop("std", None)
    return plan_finetuning(
        options.start, options.data, options.recipe, changes, model_options,
        tune=options.tune, delta=options.delta, mean=mean, std=std, distillation=distillation, labels=options.labels,
        splits=splits_of(options),
    )  # fmt: skip


def _choose(options: argparse.Namespace, opened: Any) -> list[str]:
    """Choose the model and the recipe that are not given, and say so with the command that repeats the choice."""
    from patchloom.tasks.classification.defaults import choose

    if options.model and options.recipe:
        return []
    choice = choose(options.data, options.labels, options.model, options.recipe, opened)
    added = [name for name in ("model", "recipe") if getattr(options, name) is None]
    words = [word for name in added for word in (f"--{name}", getattr(choice, name))]
    # What the user set on the command line wins over the choice.
    named = {word.partition("=")[0] for word in options.settings}
    settings = [word for word in choice.settings if word.partition("=")[0] not in named]
    options.model, options.recipe = choice.model, choice.recipe
    options.settings = [*options.settings, *settings]
    return [
        f"Chosen: model {choice.model} and recipe {choice.recipe}, for {choice.reason}. The complete command:",
        f"  {shlex.join(['patchloom', *options.words, *words, *settings])}",
    ]


def _distillation(options: argparse.Namespace) -> Any:
    """The teachers, if there are any; their words (teacher.heads=3) leave the settings."""
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.options import ClassificationOptions
    from patchloom.tasks.classification.plans import plan_distillation

    teachers = [name for name in (getattr(options, "first_teacher", None), *getattr(options, "teacher", [])) if name]
    given = {name: getattr(options, name, None) for name in ("method", "weight", "tau", "kl", "cache")}
    fields = {name: value for name, value in given.items() if value is not None}
    # `teacher.KEY` words describe a bare weight file: the network's options, or the mean and std of its images.
    words = [word for word in options.settings if word.startswith("teacher.")]
    if not teachers:
        if fields or words:
            raise PatchloomError(f"{next((f'--{name}' for name in fields), *words[:1])} applies only with --teacher.")
        return None
    options.settings = [word for word in options.settings if word not in words]
    # mean and std have keys of their own in `parse_words`; all others are options of a model, hence the prefix.
    colours = [word.removeprefix("teacher.") for word in words if word.startswith(("teacher.mean=", "teacher.std="))]
    others = [
        f"model.{word.removeprefix('teacher.')}" for word in words if word.removeprefix("teacher.") not in colours
    ]
    normal, hints = parse_words([*colours, *others], ClassificationOptions, ("mean", "std"))
    return plan_distillation(teachers, **fields, hints={**normal, **hints})


def _finish(options: argparse.Namespace) -> Any:
    """The second stage, if one is asked for; its words leave the settings."""
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.options import ClassificationOptions
    from patchloom.tasks.classification.sequence import FinishHigh

    words = [word for word in options.settings if word.startswith("finish.")]
    options.settings = [word for word in options.settings if word not in words]
    resolution = getattr(options, "finish", None)
    if resolution is None:
        if words or getattr(options, "finish_recipe", None):
            raise PatchloomError(f"{(*words, '--finish-recipe')[0]} applies only with --finish R.")
        return None
    changes, model_options = parse_words((word.removeprefix("finish.") for word in words), ClassificationOptions)
    if model_options or "resolution" in changes:
        raise PatchloomError(
            "finish. changes the recipe of the second stage, not its model or image size: --finish R is the size."
        )
    return FinishHigh(resolution, changes, options.finish_recipe)


_SETTINGS = (
    "key=value changes a field of the recipe (epochs=10) or an option of the model (model.depth=6). img_size sets the "
    "resolution."
)

COMMANDS = (
    Command(
        "train",
        "train a classifier from scratch on your images",
        "patchloom train DATA [--model M] [--recipe R] [--out RUN] [key=value ...]",
        "Train a classifier on labelled images, evaluate it and write a report. Without --model or --recipe, a "
        f"suitable one is chosen from the data and the complete command is printed. {_SETTINGS}",
        (
            "patchloom train photos/",
            "patchloom train digits --model cait_nano --recipe cait@small img_size=16 epochs=34 --out runs/digits",
        ),
        _add_train,
        _plan_train,
    ),
    Command(
        "distill",
        "train with knowledge distillation from one or more teachers",
        "patchloom distill TEACHER DATA --model M --recipe R [--method hard|soft|token] [--out RUN] [key=value ...]",
        f"Train a classifier on labels and on the logits of one or more teachers. {_SETTINGS}",
        (
            "patchloom distill runs/teacher photos/ --model deit_tiny --recipe deit --out runs/student",
            "patchloom distill timm:resnet50 photos/ --model deit_tiny --recipe deit --method soft",
        ),
        _add_distill,
        _plan_from_scratch,
    ),
    Command(
        "finetune",
        "fine-tune trained weights on new classes or at another resolution",
        "patchloom finetune FROM DATA [--resolution R] [--tune WHAT] [--out RUN] [key=value ...]",
        "Fine-tune trained weights on new classes or at another resolution. "
        f"{_SETTINGS} If a weight file has no metadata, give model.heads=3 (the number of attention heads), mean= "
        "and std=. model.head=mlp uses Grafit's head.",
        (
            "patchloom finetune deit_small.fb_in1k photos/",
            "patchloom finetune runs/photos photos/ --resolution 384 --tune attention --out runs/photos-384",
        ),
        _add_finetune,
        _plan_finetune,
    ),
)
