"""`patchloom pretrain`, and `evaluate` and `predict` for its models. Heavy imports are inside the functions."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.tasks.commands import (
    Command,
    Output,
    Tool,
    add_reading_arguments,
    add_split_arguments,
    require_data,
    splits_of,
)


def _add_pretrain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="folder of images, flat or nested, CSV file, or another source")
    group = parser.add_argument_group("model and recipe")
    group.add_argument("--method", required=True, help="method: dino, beit or mae")
    group.add_argument(
        "--model",
        required=True,
        metavar="TRUNK",
        help="model to train from random weights (a name or timm:NAME), or weights to start from (run, file or tag)",
    )
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe name: dino, beit or mae, each also with @small (default: the recipe of the method, with @small "
        "if the images are small or few)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="RUN|FILE",
        help="trained tokenizer for beit: a BeiT run or its tokenizer file (default: one is first trained on the same "
        "images)",
    )
    group = parser.add_argument_group("data")
    group.add_argument(
        "--labels",
        metavar="COLUMN",
        help="label column to measure the features with, not to train on (default: the only one)",
    )
    add_split_arguments(group)


def _plan(options: argparse.Namespace) -> Any:
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.pretraining import PretrainingOptions
    from patchloom.tasks.pretraining.plans import check_method, plan_pretraining

    check_method(options.method)
    changes, model_options = parse_words(options.settings, PretrainingOptions, ("mean", "std"))
    mean, std = changes.pop("mean", None), changes.pop("std", None)
    return plan_pretraining(
        options.data, options.model, options.method, options.recipe, changes, model_options,
        tokenizer=options.tokenizer, labels=options.labels, mean=mean, std=std,
        splits=splits_of(options),
    )  # fmt: skip


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_reading_arguments(parser)
    group = parser.add_argument_group("pre-trained models")
    group.add_argument("--labels", metavar="COLUMN", help="label column of a CSV file")
    group.add_argument("--probe", help="knn or linear (default: knn)")
    group.add_argument("--k", type=int, metavar="N", help="20 by default")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="temperature of the kNN votes (default: 0.07, as in DINO)"
    )
    group.add_argument(
        "--crop-ratio",
        metavar="RATIO",
        help="one fraction (default: that of the recipe)",
    )
    group.add_argument("--resolution", metavar="PIXELS", help="image size (default: that of the model)")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    """Nothing: a trunk has no classes to predict."""


def _evaluate(options: argparse.Namespace) -> Output:
    from patchloom.console import Console
    from patchloom.tasks.pretraining.evaluate import evaluate

    require_data(options)
    found = evaluate(
        options.model, options.data, probe=options.probe or "knn", k=options.k, temperature=options.temperature,
        labels=options.labels, split=options.split, crop_ratio=_one(options, "crop_ratio"),
        resolution=_one(options, "resolution"), batch=options.batch, workers=options.workers or 0,
        device=options.device, console=Console(sys.stderr),
    )  # fmt: skip
    by = f"{found['k']} nearest of " if found["probe"] == "knn" else "linear probe on "
    text = f"{found['top1']:.2%} of {found['count']} images, by the {by}{found['trained_on']} training images"
    return Output(found, [text])


def _one(options: argparse.Namespace, name: str) -> Any:
    """The value of an option that is declared for classifiers, which take several values of it."""
    from patchloom.errors import PatchloomError

    values = getattr(options, name)
    if values is not None and len(values) > 1:
        raise PatchloomError(f"--{name.replace('_', '-')} takes one value for a pre-trained model, not {len(values)}.")
    return values and values[0]


def _predict(options: argparse.Namespace) -> Output:
    from patchloom.tasks.pretraining.evaluate import predict

    return Output(predict(options.model, options.inputs), [])


COMMANDS = (
    Command(
        "pretrain",
        "learn features from images without labels (DINO, BeiT, MAE)",
        "patchloom pretrain DATA --method dino|beit|mae --model M [--recipe R] [--out RUN] [key=value ...]",
        "Learn features from images without labels. Labels, if there are any, only serve to measure the features. "
        "key=value changes a field of the recipe (epochs=100, local_crops=4, mask_ratio=0.6) or an option of the trunk "
        "(model.depth=6). img_size sets the resolution.",
        (
            "patchloom pretrain photos/ --method dino --model deit_small --out runs/dino",
            "patchloom pretrain photos/ --method mae --model deit_nano --recipe mae@small img_size=32",
        ),
        _add_pretrain,
        _plan,
    ),
)
EVALUATE = Tool(_add_evaluate, _evaluate)
PREDICT = Tool(_add_predict, _predict)
