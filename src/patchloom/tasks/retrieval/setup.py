"""A Grafit task from its config: images, labels and networks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from patchloom.console import Console
from patchloom.data.sources import Source
from patchloom.data.splits import Split
from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import STARTING_WEIGHTS, Images, open_images
from patchloom.tasks.retrieval.clusters import cluster_labels
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.images import label_column, labels_of, open_labelled
from patchloom.tasks.retrieval.networks import MODEL, make_modules
from patchloom.tasks.retrieval.task import Retrieval, Supervision
from patchloom.tasks.retrieval.terms import Terms, terms_of
from patchloom.tasks.spec import Context
from patchloom.text import count
from patchloom.training.checks import check_batch
from patchloom.training.processes import Processes


def open_task(config: RetrievalConfig, recipe: Recipe, context: Context) -> Retrieval:
    """The task of a run, the same in every process."""
    return make_task(config, recipe, images_of(config, recipe, context), context)


def images_of(config: RetrievalConfig, recipe: Recipe, context: Context) -> Images:
    """The images of a run, scanned and split."""
    source, start = open_labelled(config, context.opened), f"--model {STARTING_WEIGHTS}"
    return open_images(config, recipe, context, source, start)  # type: ignore[arg-type]


def make_task(config: RetrievalConfig, recipe: Recipe, images: Images, context: Context) -> Retrieval:
    """The task with its networks on images that are open already."""
    split, processes, console = images.split, context.processes, context.console
    splits = dataclasses.replace(config.splits, train=split.train_name, test=split.test_name)
    config = dataclasses.replace(config, splits=splits)
    terms = terms_of(recipe, config.labelled)
    supervision = _supervision(config, recipe, images, context)
    _report(terms, recipe, config, supervision, console)
    check_batches(recipe, terms, split, processes)
    classes = len(supervision.class_names)
    modules, report = make_modules(config, recipe, terms, classes, context)
    if report is not None:
        console.say(*report.lines())
    network: Any = modules[MODEL]
    network.class_names, network.label_column = supervision.class_names or None, supervision.column
    network.preprocessing = dataclasses.replace(
        network.preprocessing, crop_ratio=recipe.test_crop_ratio, interpolation=recipe.interpolation
    )
    return Retrieval(config, modules, terms, images, supervision, recipe, processes, console)


def _supervision(config: RetrievalConfig, recipe: Recipe, images: Images, context: Context) -> Supervision:
    source: Source = images.source
    if recipe.clusters is None:
        return Supervision(labels_of(images.split.train), source.class_names, label_column(config, source))
    known = (context.environment or {}).get("clusters")
    labels = cluster_labels(config, recipe, images, context) if known is None else torch.tensor(known)
    if len(labels) != len(images.split.train):
        raise PatchloomError("environment.json is damaged: it has other clusters than the run has images.")
    names = tuple(f"cluster {i}" for i in range(int(labels.max()) + 1))
    return Supervision(labels, names, None, tuple(labels.tolist()))


def _report(terms: Terms, recipe: Recipe, config: RetrievalConfig, supervision: Supervision, console: Console) -> None:
    """Say what is learned from what, where that is not what the loss names."""
    if not config.labelled:
        left = "The kNN loss is left out: it is 0 without labels. " if "knn" in recipe.terms else ""
        console.say(f"No labels are used. {left}The loss is {'+'.join(terms.losses)}.")
        return
    sizes = torch.bincount(supervision.labels)
    alone = [supervision.class_names[i] for i in (sizes == 1).nonzero().flatten().tolist()]
    if alone and "knn" in terms:
        shown = ", ".join(alone[:5]) + (" ..." if len(alone) > 5 else "")
        message = f"{count(len(alone), 'class', 'classes')} with one training image: {shown}."
        if recipe.singletons == "refuse":
            raise PatchloomError(
                f"{message} Such an image has no neighbour of its class; singletons=skip leaves it out."
            )
        console.say(f"{message} They have no neighbour of their class, so their kNN loss is 0.")
    if "knn" in terms and len(supervision.class_names) == 1:
        console.say("All images are of one class: the kNN loss is 0. --labels none leaves it out.")


def check_batches(recipe: Recipe, terms: Terms, split: Split, processes: Processes) -> None:
    """Refuse batches that are too small to be shared by processes, or to normalise over."""
    images = len(split.train)
    check_batch(recipe, images, processes.count)
    normalises = terms.projects and (recipe.projector == "mlp" or "inst" in terms)
    if normalises and min(recipe.batch_size, images) < 2 * processes.count * recipe.accumulate:
        raise PatchloomError(
            "Projector and predictor normalise over a batch: batch_size is at least 2 per process and accumulated step."
        )
