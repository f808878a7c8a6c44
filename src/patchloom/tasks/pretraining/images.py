"""The images of a pre-training run: any source, or a folder without classes. Labels are for measuring alone."""

from __future__ import annotations

import dataclasses

from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source, spread
from patchloom.data.splits import Split, Splits
from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images, open_images
from patchloom.tasks.opened import Opened
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.spec import Context

MONITORED = 256  # images that numbers of the log are measured on
_SMALL = 96  # pixels, up to which there are so many of them


def open_any(config: PretrainingConfig, opened: Opened, keep: bool = False) -> Source:
    """The source of a run, with labels where it has them; a plan keeps it for the task."""
    open_with = opened.keep if keep else opened.take
    return open_with(open_source, config.data, config.labels, targets="none")


def splits_of(config: PretrainingConfig, source: Source) -> Splits:
    """What is asked for; without labels nothing is measured on held-out images, so none are held out by default."""
    asked = config.splits
    if source.labelled or asked.hold_out is not None or asked.test is not None:
        return asked
    return asked if any(source.splits.get(name) for name in ("val", "test")) else Splits(asked.train, hold_out="none")


def images_of(config: PretrainingConfig, recipe: Recipe, context: Context) -> Images:
    """The images of a run, scanned and split."""
    source = open_any(config, context.opened)
    config = dataclasses.replace(config, splits=splits_of(config, source))
    return open_images(config, recipe, context, source, advise=False)  # type: ignore[arg-type]


def monitored(split: Split, size: tuple[int, int]) -> list[Item]:
    """The training images that the numbers of every evaluation are measured on, in one forward pass; half as many large
    ones."""
    return spread(split.train, MONITORED if max(size) <= _SMALL else MONITORED // 2)


def check_count(source: Source, split: Split, needed: int) -> None:
    """Refuse fewer images than anything can be learned from."""
    if len(split.train) < needed:
        raise PatchloomError(
            f"{source.where} has {len(split.train)} image to train on; pre-training compares images and needs at least "
            f"{needed}."
        )
