"""Which images to train on and which to hold out: the splits of the data, or a share of each class."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from patchloom.data.listing import SPLIT_NAMES
from patchloom.data.sources import Item, Source, bytes_of
from patchloom.errors import PatchloomError
from patchloom.text import count

_FIFTH = 5


@dataclass(frozen=True)
class Splits:
    """Which splits are asked for, several joined as "train+val"; None: the data's own, see `split_source`.

    Raises:
        PatchloomError: `test` and `hold_out` together, or a share that is not in [0, 1).
    """

    train: str | None = None
    test: str | None = None
    hold_out: float | str | None = None  # share of each class of the training split; 0 or "none": nothing

    def __post_init__(self) -> None:
        for name, split in (("train_split", self.train), ("test_split", self.test)):
            if not isinstance(split, str | None):
                raise PatchloomError(f"{name} is the name of a split, not {type(split).__name__}.")
        if self.hold_out is None:
            return
        if self.test is not None:
            raise PatchloomError(
                f"--test-split {self.test} and --hold-out {self.hold_out} exclude each other: give one."
            )
        try:
            share = 0.0 if self.hold_out == "none" else float(self.hold_out)
        except (TypeError, ValueError):
            share = -1.0
        if not 0 <= share < 1 or (share == 0 and isinstance(self.hold_out, str) and self.hold_out != "none"):
            raise PatchloomError(f"--hold-out is none or a fraction between 0 and 1, not {self.hold_out!r}.")
        object.__setattr__(self, "hold_out", share)

    def to_json(self) -> dict[str, Any]:
        """As recipe.yaml holds them."""
        return {"train_split": self.train, "test_split": self.test, "hold_out": self.hold_out}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Splits:
        """From the settings in recipe.yaml; early versions recorded none."""
        return cls(values.get("train_split"), values.get("test_split"), values.get("hold_out"))


@dataclass(frozen=True)
class Split:
    """What to train on and what to measure on; `summary` is one sentence that a command prints."""

    train: list[Item]
    held_out: list[Item]
    summary: str
    train_name: str = "train"
    test_name: str | None = None  # None: held out of the training split


def split_names(source: Source, asked: str) -> tuple[str, ...]:
    """The splits that "train+val" names; "all" is every split. One that the data lacks is refused."""
    if not isinstance(asked, str):
        raise PatchloomError(f"split is the name of a split, not {type(asked).__name__}.")
    if asked == "all":
        return tuple(source.splits)
    names = [SPLIT_NAMES.get(name.strip().lower(), name.strip()) for name in asked.split("+")]
    for name in names:
        if not source.splits.get(name):
            raise PatchloomError(f"{source.where} has no split {name!r}; it has {', '.join(source.splits)}.")
    return tuple(dict.fromkeys(names))


def join_splits(source: Source, names: Iterable[str]) -> list[Item]:
    """The images of several splits, each once."""
    return list(dict.fromkeys(item for name in names for item in source.splits[name]))


def split_source(source: Source, asked: Splits | None = None) -> Split:
    """The splits asked for, by default the data's own: train, and val or else test. Without one of them, a fifth of
    each class is held out: the same files on every machine and in every run.

    Raises:
        PatchloomError: a split that the data lacks, one that would be trained and tested on, or no training images.
    """
    asked, splits = asked or Splits(), source.splits
    train_names = split_names(source, asked.train or ("train" if splits.get("train") else "all"))
    if asked.train is None and train_names not in (("train",), ("all",)):
        raise PatchloomError(f"{source.where} has no training images; it has {', '.join(splits) or 'nothing'}.")
    test_names = _test_names(source, asked, train_names)
    train, train_name = join_splits(source, train_names), "+".join(train_names)
    if test_names:
        held_out, of = join_splits(source, test_names), "" if train_name == "train" else f" of {train_name}"
        test_name = "+".join(test_names)
        summary = f"{len(train)} images{of} to train on; {len(held_out)} of the data's own split {test_name} held out."
        return Split(train, held_out, summary, train_name, test_name)
    if asked.hold_out == 0:
        return Split(
            train, [], f"All {len(train)} images of {train_name} are trained on; none is held out.", train_name
        )
    share = float(asked.hold_out or 1 / _FIFTH)
    held_keys = _share_of_each_class(train, share, source.labelled)
    if not held_keys:
        summary = f"No class has two images: {count(len(train), 'image')} to train on; none is held out."
        return Split(train, [], summary, train_name)
    kept = [item for item in train if item.key not in held_keys]
    held_out = [item for item in train if item.key in held_keys]
    begin = "The data has no validation split. " if asked.hold_out is None else ""
    part = "a fifth" if asked.hold_out is None else f"a fraction of {share:g}"
    of_what = "of each class" if source.class_names else "of the images"
    summary = f"{begin}Held out: {part} {of_what} ({count(len(held_out), 'image')}), chosen by file name."
    return Split(kept, held_out, summary, train_name)


def _test_names(source: Source, asked: Splits, train_names: tuple[str, ...]) -> tuple[str, ...]:
    """The splits to measure on; none where images of the training split are held out."""
    if asked.test is not None:
        names = split_names(source, asked.test)
        if both := set(names) & set(train_names):
            raise PatchloomError(
                f"{', '.join(sorted(both))} would be trained on and tested on: choose different splits."
            )
        return names
    own = [name for name in ("val", "test") if source.splits.get(name) and name not in train_names]
    if asked.hold_out is not None:
        if "val" in own:
            raise PatchloomError(
                f"{source.where} has its own split val: --hold-out is for data without one. --train-split and "
                f"--test-split choose among {', '.join(source.splits)}."
            )
        return ()
    return tuple(own[:1])


def _share_of_each_class(items: list[Item], share: float, labelled: bool) -> set[str]:
    """The keys to hold out, of each class those with the smallest hashes; images without a class are one class."""
    by_class: dict[int, list[str]] = defaultdict(list)
    for item in items:
        by_class[item.label if labelled else -1].append(item.key)
    # Exact: in floating point, int(100 * 0.29) is 28.
    exact = Fraction(str(share))
    held: set[str] = set()
    for keys in by_class.values():
        # A class with one image keeps it for training.
        if len(keys) > 1:
            # A hash of the name shuffles without a seed: images that are added later move few others.
            keys.sort(key=lambda key: hashlib.sha256(bytes_of(key)).digest())
            held.update(keys[: max(1, int(len(keys) * exact))])
    return held
