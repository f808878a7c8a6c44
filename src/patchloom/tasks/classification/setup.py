"""What a job needs before the loop can begin: readable images, and a network."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

import torch

from patchloom.console import Console
from patchloom.data.check import ACROSS, duplicates, pair_lines
from patchloom.data.opening import open_source
from patchloom.data.randomness import seed_of
from patchloom.data.scan import find_unreadable, pixel_digest, report_skipped
from patchloom.data.sources import Item, Source
from patchloom.data.splits import Split, split_source
from patchloom.errors import PatchloomError
from patchloom.inference.intervals import few_images_warning
from patchloom.models.network import Network
from patchloom.models.registry import build
from patchloom.recipes.small import SUFFIX
from patchloom.runs.config import Job
from patchloom.tasks.classification.distillation import Distill
from patchloom.tasks.classification.start import fill_from, freeze
from patchloom.tasks.classification.task import Classify
from patchloom.tasks.classification.teachers import STUDENT, TeacherCache, Teachers, open_teacher
from patchloom.training.loop import check_batch
from patchloom.training.processes import Processes
from patchloom.weights.load import copy_scales

FEW_FOR_SCRATCH = 5000  # training images, below which trained weights are the better start
STARTING_WEIGHTS = "deit_small.fb_in1k"
_SCANNED = 64  # images between two looks at the clock
# fields of a recipe that change nothing in the images of a step
_NOT_OF_IMAGES = {
    *("name", "summary", "sources", "epochs", "workers", "checkpoint_every", "optimizer", "betas", "eps", "momentum"),
    *("nesterov", "weight_decay", "no_decay", "clip_grad", "lr", "head_lr", "lr_scaling", "schedule", "schedule_by"),
    *("schedule_published", "warmup_epochs", "warmup_lr", "min_lr", "decay_epochs", "loss", "label_smoothing"),
    *("bce_threshold", "drop_path", "layerscale", "ema", "ema_warmup", "test_crop_ratio", "precision", "compile"),
    *("gradient_checkpointing", "log_norms", "drop_path_decay", "dropout", "scale", "tune", "sync_batchnorm"),
}


def source_of(job: Job) -> Source:
    """The images of a job, with the classes in the order of the heads that it starts with."""
    source = open_source(job.data, job.labels)
    names = job.start.class_names if job.start else None
    return source.in_order(names) if names else source


def open_data(
    job: Job, console: Console, processes: Processes, strict: bool = False, seconds: float = math.inf
) -> tuple[Source, Split, dict[str, str]]:
    """The source of a job without its unreadable files, split, and those files with the reasons. After `seconds` the
    other images are taken as they are."""
    source = source_of(job)
    glances: dict[str, bytes] = {}
    found = _unreadable(source, source.items()[processes.rank :: processes.count], console, seconds, glances)
    parts = processes.gather((found, glances))
    bad = {key: reason for part, _ in parts for key, reason in part.items()}
    if bad:
        report_skipped(bad, console, strict)
    usable = source.without(bad)
    for name, items in source.splits.items():
        if items and not usable.splits[name]:
            raise PatchloomError(f"No image of {job.data} in its split {name!r} can be read.")
    split = split_source(usable, job.splits)
    for note in getattr(source, "notes", ()):
        console.say(note)
    console.say(
        f"{job.data}: {len(split.train)} training images, {len(split.held_out)} held out, "
        f"{len(source.class_names)} classes. {split.summary}"
    )
    glances = {key: seen for _, part in parts for key, seen in part.items()}
    console.say(*_advice(job, split), *_equal_images(usable, split, glances))
    return usable, split, bad


def _unreadable(
    source: Source, items: Sequence[Item], console: Console, seconds: float, glances: dict[str, bytes]
) -> dict[str, str]:
    """The files that cannot be read, with the reasons; `glances` gets those of the others."""

    def progress(done: int, of: int) -> None:
        console.progress(f"reading images: {done} of {of}")

    deadline = time.monotonic() + seconds
    found: dict[str, str] = {}
    size = len(items) if seconds == math.inf else _SCANNED
    for start in range(0, len(items), max(1, size)):
        if time.monotonic() > deadline:
            console.say(f"Only the first {start} of {len(items)} images were read to find damaged ones.")
            break
        part = items[start : start + size]
        found |= find_unreadable(source, part, progress, glances=glances)
    return found


def _advice(job: Job, split: Split) -> Iterator[str]:
    """What the number of images means for the run."""
    if job.start is None and len(split.train) < FEW_FOR_SCRATCH:
        small = "" if job.recipe.name.endswith(SUFFIX) else f", or --recipe {job.recipe.name}{SUFFIX}"
        yield (
            f"{len(split.train)} training images are few for training from scratch (fewer than {FEW_FOR_SCRATCH}). "
            f"Consider `patchloom finetune {STARTING_WEIGHTS} {quote(job.data)}`, which starts from published "
            f"weights{small}."
        )
    if split.held_out and (warning := few_images_warning(len(split.held_out))):
        yield warning


def _equal_images(source: Source, split: Split, glances: Mapping[str, bytes]) -> list[str]:
    """Images that are trained on and measured on, which flatters the accuracy. Only those that look the same at a
    glance are read once more."""
    if split.held_out is split.train:
        return []
    sides = {"training": split.train, "held out": split.held_out}
    both = {glances.get(item.key) for item in split.train} & {glances.get(item.key) for item in split.held_out}
    both.discard(None)  # images that were not looked at
    across, _ = duplicates(
        (item.key, side, pixel_digest(source.read(item)))
        for side, items in sides.items()
        for item in items
        if glances.get(item.key) in both
    )
    lines = pair_lines(ACROSS, across, f"`patchloom data check {quote(source.where)} --json` lists all")
    return [f"Warning: {lines[0]}", *lines[1:]] if lines else []


def make_task(
    job: Job, source: Source, split: Split, processes: Processes, console: Console, begin: bool = True
) -> Classify:
    """The task with its network, the same in every process. `begin`: with the weights that the job starts from;
    otherwise they come from a checkpoint."""
    recipe = job.recipe
    if len(split.train) < recipe.batch_size:
        console.say(
            f"All {len(split.train)} training images are one batch: fewer than batch_size={recipe.batch_size}. The "
            f"learning rate stays {recipe.lr:.3g}."
        )
    check_batch(recipe, len(split.train), processes.count)
    network = _network(job, source, console, begin)
    if network.config.head == "mlp" and min(recipe.batch_size, len(split.train)) < 2 * processes.count:
        raise PatchloomError("The MLP head normalises over a batch: batch_size is at least 2 a process.")
    if job.teaching is None:
        return Classify(network, source, split, recipe, processes)
    task = Distill(network, source, split, recipe, processes)
    task.teaching, task.teachers = job.teaching, _teachers(job, task, console)
    return task


def _network(job: Job, source: Source, console: Console, begin: bool) -> Network:
    recipe, start = job.recipe, job.start
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "start"))
        network = build(job.network_config(len(source.class_names)))
    if job.scales_from is not None and begin:
        copy_scales(network, job.scales_from)
        console.say(f"The scales of the residual branches are those of {job.scales_from}.")
    if start is not None:
        if begin:
            console.say(*fill_from(network, start).lines())
        freeze(network, start.tune)
        network.preprocessing = dataclasses.replace(start.preprocessing, img_size=network.config.img_size)
    network.class_names = source.class_names
    network.preprocessing = dataclasses.replace(
        network.preprocessing, crop_ratio=recipe.test_crop_ratio, interpolation=recipe.interpolation
    )
    return network


def _teachers(job: Job, task: Classify, console: Console) -> Teachers:
    teaching, recipe, how = job.teaching, job.recipe, task.network.preprocessing
    assert teaching is not None
    hints = dict(teaching.hints)
    if hints.get("img_size") == STUDENT:
        hints["img_size"] = how.img_size
    teachers = [open_teacher(name, task.processes.device, hints) for name in teaching.teachers]
    cache = None
    if teaching.cache is not None:
        images = recipe.epochs * task.steps_per_epoch * task.images_per_step
        size = images * len(task.source.class_names) * 4
        console.say(f"What the teachers say is kept in {teaching.cache}: {size / 1e6:.1f} MB for {images} images.")
        draws = {name: value for name, value in recipe.to_json().items() if name not in _NOT_OF_IMAGES}
        key = [
            task.source.fingerprint(), task.source.class_names, draws, how.img_size, how.mean, how.std,
            task.processes.count, [teacher.identity for teacher in teachers],
        ]  # fmt: skip
        cache = TeacherCache(Path(teaching.cache), key, console.say)
    taught = Teachers(teachers, task.source.class_names, cache)
    for note in taught.notes:
        console.say(note)
    return taught
