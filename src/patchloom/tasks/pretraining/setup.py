"""A pre-training task from its config: images, trunk and method."""

from __future__ import annotations

import dataclasses

import torch

from patchloom.data.order import Order
from patchloom.data.randomness import seed_of
from patchloom.models.network import Network
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images
from patchloom.tasks.classification.start import fill_from
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.images import check_count, images_of
from patchloom.tasks.pretraining.method import Method, Setup, find_method
from patchloom.tasks.pretraining.task import Pretraining
from patchloom.tasks.spec import Context
from patchloom.training.checks import check_batch
from patchloom.training.schedule import total_steps
from patchloom.weights.shape import shape_of


def open_task(config: PretrainingConfig, recipe: Recipe, context: Context) -> Pretraining:
    """The task of a run, the same in every process."""
    return make_task(config, recipe, images_of(config, recipe, context), context)


def make_task(config: PretrainingConfig, recipe: Recipe, images: Images, context: Context) -> Pretraining:
    """The task with its modules on images that are open already."""
    split = images.split
    # The split that was found is written down: a resumed run must not choose again.
    splits = dataclasses.replace(config.splits, train=split.train_name, test=split.test_name)
    if not split.held_out:
        splits = dataclasses.replace(splits, test=None, hold_out="none")
    config = dataclasses.replace(config, splits=splits)
    kind = find_method(recipe.method)
    check_count(images.source, split, kind.needs_images)
    check_batch(recipe, len(split.train), context.processes.count)
    method = _make_method(kind, config, recipe, len(split.train), context)
    return Pretraining(config, method, images, recipe, context.processes, context.console)


def _make_method(
    kind: type[Method], config: PretrainingConfig, recipe: Recipe, images: int, context: Context
) -> Method:
    # The weights depend on the seed alone, and the caller's generator stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "start"))
        trunk = _make_trunk(config, recipe, context, kind.trains_trunk)
        per_epoch = Order(images, recipe.batch_size).steps_per_epoch
        steps = total_steps(recipe, per_epoch)
        return kind(
            Setup(config, recipe, trunk, per_epoch, steps, context.processes, context.console, context.from_checkpoint)
        )


def _make_trunk(config: PretrainingConfig, recipe: Recipe, context: Context, trained: bool) -> Network:
    """The trunk without a head, with random weights or those of `config.start`; without memory if it is not trained."""
    start, outline = config.start, config.trunk_config(recipe)
    trunk: Network = build(outline) if trained else shape_of(outline, outline.name)
    preprocessing = trunk.preprocessing if start is None else start.preprocessing
    if trained and not context.from_checkpoint:
        if start is not None:
            context.console.say(*fill_from(trunk, start, context.opened).lines())
        else:
            context.console.say(f"{trunk.config.name} starts from random weights.")
    trunk.preprocessing = dataclasses.replace(
        preprocessing, img_size=trunk.config.img_size, crop_ratio=recipe.test_crop_ratio,
        interpolation=recipe.interpolation,
    )  # fmt: skip
    return trunk
