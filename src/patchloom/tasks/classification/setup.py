"""A classification task from its config: the images, the network with its starting weights, and the teachers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patchloom.data.randomness import seed_of
from patchloom.data.sources import Source
from patchloom.data.transforms import Augmentation
from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.config import ClassificationConfig
from patchloom.tasks.classification.distillation import Distillation
from patchloom.tasks.classification.heads import fit_head
from patchloom.tasks.classification.images import Images, open_images
from patchloom.tasks.classification.losses import Loss
from patchloom.tasks.classification.start import fill_from, freeze
from patchloom.tasks.classification.task import Classification
from patchloom.tasks.classification.teacher_cache import TeacherCache
from patchloom.tasks.classification.teachers import STUDENT, Teachers, open_teacher
from patchloom.tasks.spec import Context
from patchloom.training.checks import check_batch
from patchloom.training.schedule import total_steps
from patchloom.weights.load import copy_scales, load

# fields of a recipe that change nothing in the images of a step, or in what a teacher computes for them (precision)
_NOT_OF_IMAGES = {
    *("name", "summary", "sources", "epochs", "steps", "workers", "checkpoint_every", "eval_every", "optimizer"),
    *("betas", "eps", "momentum", "nesterov", "weight_decay", "weight_decay_end", "no_decay", "clip_grad", "lr"),
    *("head_lr", "layer_decay", "lr_scaling", "schedule", "schedule_by", "schedule_published", "warmup_epochs"),
    *("warmup_lr", "min_lr", "decay_epochs", "loss", "label_smoothing", "bce_threshold", "drop_path", "layerscale"),
    *("ema", "ema_warmup", "test_crop_ratio", "warmup_steps", "compile", "gradient_checkpointing", "log_norms"),
    *("drop_path_decay", "dropout", "scale", "tune", "sync_batchnorm"),
}


@dataclass(frozen=True)
class OwnParts:
    """Python objects of the user's own in place of ours; they are not in recipe.yaml."""

    source: Source | None = None
    network: Network | None = None
    loss: Loss | None = None
    augmentation: Augmentation | None = None


_NONE = OwnParts()


def open_task(config: ClassificationConfig, recipe: Recipe, context: Context, own: OwnParts = _NONE) -> Classification:
    """The task of a run, the same in every process."""
    return make_task(config, recipe, open_images(config, recipe, context, own.source), context, own)


def make_task(
    config: ClassificationConfig, recipe: Recipe, images: Images, context: Context, own: OwnParts = _NONE
) -> Classification:
    """The task with its network on images that are open already.

    Args:
        images: of `open_images`.
        own: objects of the user's that replace the network, loss or augmentation of the config.
    """
    split, processes, console = images.split, context.processes, context.console
    # The split that was found is written down: a resumed run must not choose again.
    config = dataclasses.replace(
        config, splits=dataclasses.replace(config.splits, train=split.train_name, test=split.test_name)
    )
    if len(split.train) < recipe.batch_size:
        console.say(
            f"All {len(split.train)} training images are one batch: fewer than batch_size={recipe.batch_size}. The "
            f"learning rate stays {recipe.lr:.3g}."
        )
    check_batch(recipe, len(split.train), processes.count)
    network = own.network or _make_network(config, recipe, images, context)
    _describe(network, recipe, images)
    network.label_column = config.labels
    if (
        getattr(network.config, "head", None) == "mlp"
        and min(recipe.batch_size, len(split.train)) < 2 * processes.count
    ):
        raise PatchloomError("The MLP head normalises over a batch: batch_size is at least 2 per process.")
    if context.environment is not None and config.start is not None and config.start.delta:
        load(config.start.weights, **config.start.hints)  # missed now rather than after the last epoch
    parts: Any = (config, network, images, recipe, processes, console, own.loss, own.augmentation)
    if config.distillation is None:
        return Classification(*parts)
    task = Distillation(*parts)
    task.teachers = _open_teachers(task, writes=context.writes)
    if context.environment is not None and context.environment.get("teachers", []) != task.environment()["teachers"]:
        raise PatchloomError("A teacher has changed since the run began: exact resuming needs the same.")
    return task


def _make_network(config: ClassificationConfig, recipe: Recipe, images: Images, context: Context) -> Network:
    """The network with the weights that the run starts from, unless a checkpoint brings them."""
    start, class_names, console = config.start, images.source.class_names, context.console
    # The generator of the caller's process stays as it is. Building happens on the CPU, hence no devices.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "start"))
        planned = config.network_config(recipe, len(class_names))
        if planned.num_classes != len(class_names):
            raise PatchloomError(
                f"num_classes={planned.num_classes}: {config.data} has {len(class_names)} classes. Leave it out."
            )
        network = build(planned)
    if config.scales_from is not None and not context.from_checkpoint:
        copy_scales(network, config.scales_from)
        console.say(f"The scales of the residual branches are those of {config.scales_from}.")
    if start is not None:
        if not context.from_checkpoint:
            console.say(*fill_from(network, start, context.opened).lines())
        freeze(network, start.tune)
        network.preprocessing = dataclasses.replace(start.preprocessing, img_size=network.config.img_size)
    return network


def _describe(network: Network, recipe: Recipe, images: Images) -> None:
    """Class names and test preprocessing, which travel with the weights."""
    network.class_names = images.source.class_names
    network.preprocessing = dataclasses.replace(
        network.preprocessing, crop_ratio=recipe.test_crop_ratio, interpolation=recipe.interpolation
    )


def _open_teachers(task: Distillation, writes: bool) -> Teachers:
    """The teachers of a task, with the cache of their logits where one is asked for and files may be written."""
    config, recipe, preprocessing = task.distillation, task.recipe, task.network.preprocessing
    hints = dict(config.hints)
    if hints.get("img_size") == STUDENT:
        hints["img_size"] = preprocessing.img_size
    fit = partial(fit_head, source=task.source, items=task.split.train, workers=recipe.workers, console=task.console)
    teachers = [open_teacher(name, task.processes.device, hints, fit) for name in config.teachers]
    cache = None
    if config.cache is not None and writes:
        images = total_steps(recipe, task.steps_per_epoch) * task.order.images_per_step
        size = images * len(task.source.class_names) * 4
        task.console.say(f"The teachers' logits are kept in {config.cache}: {size / 1e6:.1f} MB for {images} images.")
        draws = {name: value for name, value in recipe.to_json().items() if name not in _NOT_OF_IMAGES}
        # Everything that decides the pixels of a step or the teachers' logits for them. Settings that do not (a
        # learning rate) are left out, so that runs which differ only in those share the cache.
        key = [
            task.images.fingerprint, task.source.class_names, draws, preprocessing.img_size, preprocessing.mean,
            preprocessing.std, task.processes.count, [teacher.identity for teacher in teachers],
        ]  # fmt: skip
        cache = TeacherCache(Path(config.cache), key, task.console.say)
    opened = Teachers(teachers, task.source.class_names, cache)
    task.console.say(*opened.notes)
    return opened
