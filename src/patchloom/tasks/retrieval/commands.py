"""`patchloom grafit`, and `evaluate` and `predict` for its models. Heavy imports are inside the functions."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.tasks.classification.evaluate_command import predictions_output
from patchloom.tasks.commands import (
    Command,
    Output,
    Tool,
    add_reading_arguments,
    add_split_arguments,
    require_data,
    require_images,
    splits_of,
)

_FIELDS = ("loss", "views", "projector", "instance_weight")  # of the recipe, that have an option of their own


def _add_grafit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="CSV file, folder with one subfolder per class, or another source")
    group = parser.add_argument_group("model and recipe")
    group.add_argument(
        "--model",
        required=True,
        metavar="TRUNK",
        help="model to train from random weights (a name or timm:NAME), or weights to start from (run, file or tag)",
    )
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe name: grafit, grafit_fc, grafit_baseline, snca, snca_plus, clusterfit_plus, each also with @small "
        "(default: grafit, or grafit@small if the images are small or few)",
    )
    group = parser.add_argument_group("method")
    group.add_argument(
        "--loss", help="loss: knn+inst, knn, inst, ce, ce+inst, triplet or ce+triplet (default: set by the recipe)"
    )
    group.add_argument("--projector", help="projector: mlp, fc or none (default: set by the recipe)")
    group.add_argument("--views", type=int, metavar="T", help="number of augmented views per image (default: 4)")
    group.add_argument(
        "--instance-weight", type=float, metavar="X", help="weight of the instance or triplet loss (default: 1)"
    )
    group.add_argument(
        "--clusters-from",
        metavar="RUN",
        help="model whose embeddings are clustered, for clusterfit_plus (default: a baseline that is trained first)",
    )
    group = parser.add_argument_group("data")
    group.add_argument(
        "--labels",
        metavar="COLUMN",
        help="label column to train on, or none to train without labels (default: the only column)",
    )
    add_split_arguments(group)


def _plan(options: argparse.Namespace) -> Any:
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.grafit import RetrievalOptions
    from patchloom.tasks.retrieval.sequence import plan_runs

    changes, model_options = parse_words(options.settings, RetrievalOptions, ("mean", "std"))
    for name in _FIELDS:
        given = getattr(options, name)
        if given is not None and changes.setdefault(name, given) != given:
            flag = name.replace("_", "-")
            raise PatchloomError(f"--{flag} {given} contradicts {name}={changes[name]}: give one.")
    return plan_runs(
        options.data, options.model, options.recipe, changes, model_options, labels=options.labels,
        mean=changes.pop("mean", None), std=changes.pop("std", None), clusters_from=options.clusters_from,
        splits=splits_of(options),
    )  # fmt: skip


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_reading_arguments(parser)
    # `evaluate --k` has its description from the classifiers.
    _add_shared(parser.add_argument_group("Grafit models"), "by default chosen by leave-one-out")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Grafit models")
    group.add_argument(
        "--collection", metavar="DATA", help="labelled images to compare with (default: those of the run)"
    )
    _add_shared(group, "number of neighbours (default: chosen by leave-one-out)")
    group.add_argument("--top", type=int, default=5, metavar="N", help="number of classes to print (default: 5)")


def _add_shared(group: Any, neighbours: str) -> None:
    group.add_argument("--labels", metavar="COLUMN", help="label column (default: the one that the run was trained on)")
    group.add_argument("--k", type=int, metavar="N", help=neighbours)


def _evaluate(options: argparse.Namespace) -> Output:
    from patchloom.tasks.retrieval.evaluate import evaluate

    require_data(options)
    found = evaluate(
        options.model, options.data, labels=options.labels, split=options.split, k=options.k, batch=options.batch,
        workers=options.workers or 0, strict=options.strict, device=options.device, console=Console(sys.stderr),
    )  # fmt: skip
    of = f" of {found['labels']}" if found["labels"] else ""
    text = f"kNN accuracy{of}: {found['knn']:.2%} of {found['count']} images, by the {found['k']} nearest of "
    return Output(found, [f"{text}{found['collection']}"])


def _predict(options: argparse.Namespace) -> Output:
    from patchloom.tasks.retrieval.evaluate import predict

    require_images(options)
    rows = predict(
        options.model, options.inputs, collection=options.collection, labels=options.labels, k=options.k,
        top=options.top, device=options.device,
    )  # fmt: skip
    return predictions_output(rows)


COMMANDS = (
    Command(
        "grafit",
        "learn embeddings for fine-grained image search from coarse labels",
        "patchloom grafit DATA --model TRUNK [--labels COLUMN] [--recipe R] [--out RUN] [key=value ...]",
        "Train an embedding that ranks images by fine-grained similarity, from coarse labels or none (Grafit). "
        "key=value changes a field of the recipe (epochs=10) or an option of the trunk (model.depth=6). img_size sets "
        "the resolution. If a weight file has no metadata, give model.heads=3, mean= and std=.",
        (
            "patchloom grafit photos.csv --labels species --model timm:resnet50 --out runs/photos",
            "patchloom grafit photos.csv --labels none --model deit_small.fb_in1k --views 2",
        ),
        _add_grafit,
        _plan,
    ),
)
EVALUATE = Tool(_add_evaluate, _evaluate)
PREDICT = Tool(_add_predict, _predict)
