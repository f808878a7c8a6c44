"""Which images a model is evaluated on: those that its run held out, or a split of the data."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from os import PathLike
from pathlib import Path

from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.data.scan import report_skipped, scan
from patchloom.data.sources import Item, Source
from patchloom.data.splits import join_splits, split_names, split_source
from patchloom.errors import PatchloomError
from patchloom.inference.intervals import few_images_warning
from patchloom.inference.models import Model
from patchloom.models.foreign import is_onnx, is_timm
from patchloom.models.network import Network
from patchloom.training.run import Run
from patchloom.weights.hub import is_remote

# In place of the name of a split: what the run trained on, also where the data has a split "train" with other images.
_TRAINED = "\0trained"


def open_items(
    data: str | PathLike[str] | Source,
    labels: str | None,
    split: str | None,
    run: RunSplit | None = None,
    strict: bool = False,
    workers: int = 0,
    console: Console | None = None,
) -> tuple[Source, list[Item]]:
    """The readable images of a split, and where they come from. Other images are not read.

    Args:
        data, labels: as of `open_source`; a source that is open is taken as it is.
        split: "train", "val", "test", joined as "train+val", or "all"; None: see `choose_items`.
        run: what the run of the model held out, from `held_out_by`.
        strict: unreadable files are an error.

    Raises:
        PatchloomError: no such split, or no readable image in it.
    """
    console = console or Console(quiet=True)
    source = open_source(data, labels)
    # Which images the fifth of training has depends on which of all can be read.
    fifth = _is_fifth(source, split, run)
    items, called = (source.items(), "") if fifth else choose_items(source, split, run)
    bad = scan(source, items, console, max(2, workers))
    if bad:
        report_skipped(bad, console, strict)
    for note in source.notes:
        console.say(note)
    if fifth:
        items, called = choose_items(source.without(bad), split, run)
    items = [item for item in items if item.key not in bad]
    if not items:
        raise PatchloomError(f"{source.where} has no readable image in {called}.")
    console.say(f"{len(items)} images: {called}.")
    if warning := few_images_warning(len(items)):
        console.say(warning)
    return source, items


@dataclasses.dataclass(frozen=True)
class RunSplit:
    """What a run trained on and held out: names of splits, and the images where it chose them itself."""

    train: str | None = None
    test: str | None = None
    held_out: frozenset[str] | None = None

    def tested(self, source: Source) -> list[str] | None:
        """The run's test splits, where the data has all of them by name."""
        names = [] if self.test is None else self.test.split("+")
        return names if names and all(source.splits.get(name) for name in names) else None

    def trained(self, source: Source) -> str | None:
        """The run's training splits, where the data has all of them by name."""
        known = self.train is not None and all(source.splits.get(name) for name in self.train.split("+"))
        return self.train if known else None

    def fitted(self, source: Source) -> str:
        """The split to fit a probe to, for `choose_items`: what the run trained on, without what it held out."""
        return _TRAINED if self.held_out is not None else self.trained(source) or "train"


def choose_items(source: Source, split: str | None, run: RunSplit | None = None) -> tuple[list[Item], str]:
    """The images of a split, by default those that the run, or training, holds out, and how they are called."""
    if split == "all":
        return source.items(), "all images"
    if split == "":
        raise PatchloomError("--split is empty: name a split of the data, or all.")
    if split == _TRAINED:
        return _chosen_by_training(source, "train", run)
    # A model from a run is tested where the run was tested, never on what it was trained on.
    if split is None and run is not None and (tested := run.tested(source)):
        return join_splits(source, tested), f"the run's test split {run.test}"
    held_out = run.held_out if run is not None else None
    own = [name for name in ("val", "test") if source.splits.get(name)]
    if split is None and own and held_out is None:
        return source.splits[own[0]], f"the split {own[0]}"
    if split is None or (split in ("train", "val") and not own):
        return _chosen_by_training(source, split, run)
    return join_splits(source, split_names(source, split)), f"the split {split}"


def _is_fifth(source: Source, split: str | None, run: RunSplit | None) -> bool:
    """Whether `choose_items` divides the images as training would: no split has a name, and no run has chosen."""
    if split not in (None, "train", "val") or source.splits.get("val") or source.splits.get("test"):
        return False
    return run is None or (run.held_out is None and not (split is None and run.tested(source)))


def _chosen_by_training(source: Source, split: str | None, run: RunSplit | None) -> tuple[list[Item], str]:
    """For data without a split to evaluate on: the images that the run held out, or that training would hold out.

    With the split "train", all images but those.
    """
    if run is None or run.held_out is None:
        parts, who = split_source(source), "the fifth that training would hold out"
        train, held_out = parts.train, parts.held_out
        # For a model that may not have been trained on this data, all images say something.
        if not held_out:
            return train, "all images: no class has two, so training would hold out none"
    else:
        keys, who = run.held_out, "what the run held out"
        named = run.trained(source) or ("train" if "train" in source.splits else "all")
        everything = join_splits(source, split_names(source, named))
        train = [item for item in everything if item.key not in keys]
        held_out = [item for item in everything if item.key in keys]
        if not keys and split != "train":
            known = ", ".join(name for name, items in source.splits.items() if items)
            raise PatchloomError(
                f"The run held out no image of {source.where}: choose --split all or one of its splits ({known})."
            )
    if split == "train":
        return train, f"all but {who}"
    return held_out, f"{who}; --split all takes every image"


def held_out_by(model: Model, data: str | PathLike[str]) -> RunSplit | None:
    """The splits of a run where the model comes from its folder, and the images that it held out of this data."""
    if isinstance(model, Network) or is_timm(model) or is_onnx(model) or is_remote(model):
        return None
    if not isinstance(data, str | PathLike):  # a dataset of the user's own
        return None
    if (run := Run.of(Path(model).resolve())) is None:
        return None
    with suppress(PatchloomError, OSError, KeyError):
        data_of_run, settings = run.environment()["data"], run.settings
        # Held-out images are names: they mean nothing in other data.
        same = os.path.realpath(data_of_run["where"]) == os.path.realpath(data)
        held_out = frozenset(data_of_run["held_out"]) if same and "held_out" in data_of_run else None
        return RunSplit(settings.get("train_split"), settings.get("test_split"), held_out)
    return None
