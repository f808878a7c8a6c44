"""The images of a classification run: opened once, scanned for unreadable files, split and checked for duplicates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from patchloom.data.check import equal_images
from patchloom.data.opening import open_source
from patchloom.data.scan import report_skipped, scan
from patchloom.data.sources import Source
from patchloom.data.splits import Split, split_source
from patchloom.errors import PatchloomError
from patchloom.inference.intervals import few_images_warning
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.small import SUFFIX
from patchloom.tasks.classification.config import ClassificationConfig
from patchloom.tasks.opened import Opened
from patchloom.tasks.spec import Context

FEW_FOR_SCRATCH = 5000  # training images, below which trained weights are the better start
STARTING_WEIGHTS = "deit_small.fb_in1k"


@dataclass(frozen=True)
class Images:
    """What a run learns from and is measured on."""

    source: Source  # without the unreadable files
    split: Split
    skipped: Mapping[str, str]  # unreadable files with the reasons
    fingerprint: str  # of all files

    def to_json(self, where: str) -> dict[str, Any]:
        """What environment.json holds of the data `where`: what tells a change, and which images were held out."""
        found: dict[str, Any] = {
            "where": where,
            "fingerprint": self.fingerprint,
            "skipped": dict(self.skipped),
            "split": self.split.summary,
        }
        # Held out by us, not by a split of the data: the names are noted, so that a later `evaluate` uses just the
        # images that the run never saw.
        if self.split.test_name is None:
            found["held_out"] = [item.key for item in self.split.held_out]
        return found


def open_classes(config: ClassificationConfig, opened: Opened) -> Source:
    """The source of a config, with the classes in the order of the heads that it starts with."""
    source = opened.take(open_source, config.data, config.labels)
    names = config.start.class_names if config.start else None
    return source.in_order(names) if names else source


def open_images(
    config: ClassificationConfig,
    recipe: Recipe,
    context: Context,
    source: Source | None = None,
    from_weights: str | None = None,
    advise: bool = True,
) -> Images:
    """The images of a new run, scanned for unreadable files; for a resumed run, those that it began with.

    `source` is given if it is open already. `from_weights` has the words of a command that starts from weights, which
    is recommended for few images. `advise`: say what their number means for a classifier.

    Raises:
        PatchloomError: the images of a resumed run have changed, none can be read, or (strict) one cannot.
    """
    source = source or open_classes(config, context.opened)
    fingerprint = source.fingerprint()
    if context.environment is None:
        images, glances = _scan(config, source, fingerprint, context)
        advice = _advice(config, recipe, images.split, from_weights) if advise else ()
        context.console.say(*advice, *equal_images(images.source, images.split, glances))
        return images
    known = context.environment["data"]
    # Other images under the same names would change every batch from here on.
    if known.get("fingerprint") != fingerprint:
        raise PatchloomError(
            f"{config.data} has changed since the run began: exact resuming needs the same images and labels."
        )
    skipped = dict(known.get("skipped", {}))
    # Not scanned again: a file that has become unreadable meanwhile must stop the run, not change its batches.
    usable = source.without(skipped)
    return Images(usable, split_source(usable, config.splits), skipped, fingerprint)


def _scan(
    config: ClassificationConfig, source: Source, fingerprint: str, context: Context
) -> tuple[Images, dict[str, bytes]]:
    """Leave out what cannot be read. After `context.scan_seconds` the other images are taken as they are. Gives
    the images, and a glance at each that was read."""
    processes, console = context.processes, context.console
    glances: dict[str, bytes] = {}
    # Each process reads its share; all get the whole list, since skipped files decide the order of the batches.
    mine = source.items()[processes.rank :: processes.count]
    parts = processes.gather((scan(source, mine, console, seconds=context.scan_seconds, glances=glances), glances))
    bad = {key: reason for part, _ in parts for key, reason in part.items()}
    if bad:
        report_skipped(bad, console, context.strict)
    usable = source.without(bad)
    for name, items in source.splits.items():
        if items and not usable.splits[name]:
            raise PatchloomError(
                f"No image of {config.data} in its split {name!r} can be read: {items[0].key}: {bad[items[0].key]}"
            )
    split = split_source(usable, config.splits)
    console.say(*source.notes)
    classes = f"{len(source.class_names)} classes" if source.labelled else "no classes"
    console.say(
        f"{config.data}: {len(split.train)} training images, {len(split.held_out)} held out, {classes}. {split.summary}"
    )
    glances = {key: glance for _, part in parts for key, glance in part.items()}
    return Images(usable, split, bad, fingerprint), glances


def _advice(config: ClassificationConfig, recipe: Recipe, split: Split, from_weights: str | None) -> Iterator[str]:
    """What the number of images means for the run."""
    if config.start is None and len(split.train) < FEW_FOR_SCRATCH:
        words = from_weights or f"patchloom finetune {STARTING_WEIGHTS} {quote(config.data)}"
        small = "" if recipe.name.endswith(SUFFIX) else f", or --recipe {recipe.name}{SUFFIX}"
        yield (
            f"{len(split.train)} training images are few for training from scratch (fewer than {FEW_FOR_SCRATCH}). "
            f"Consider `{words}`, which starts from published weights{small}."
        )
    if split.held_out and (warning := few_images_warning(len(split.held_out))):
        yield warning
