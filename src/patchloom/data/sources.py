"""A source lists the images of a data set, by split, and reads any one of them.

`opening` makes the sources of folders, files and archives, `own` those of a user's own dataset, and `splits` chooses
what to train on and what to hold out.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from patchloom.data.decoding import decode, decode_picture, read_encoded
from patchloom.data.images import Picture
from patchloom.errors import PatchloomError, did_you_mean

DEFAULT_COLUMN = "label"  # the column of data that has labels without a name, such as class folders
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source, and what is to be learned from it.

    The target is
        int               the index of its class in `Source.class_names`
        {column: int}     one index per label column, into `Source.columns[column]`
        str               a text, or the path of a mask
        None              nothing is known of the image
    or whatever else a task understands, such as boxes. Items are equal if keys and targets are.
    """

    key: str  # stable name within the source: the path relative to it, or a number
    target: Any = None

    def __hash__(self) -> int:  # targets may be dicts, which have no hash
        return hash(self.key)

    @property
    def label(self) -> int:
        """The index of the class; with several label columns, that of the first."""
        target = next(iter(self.target.values()), None) if isinstance(self.target, Mapping) else self.target
        if not isinstance(target, (int, np.integer)):
            raise PatchloomError(f"The image {self.key} has no class; its target is {self.target!r}.")
        return int(target)

    def with_label(self, label: int) -> Item:
        """The same image with another class, in the first of several columns."""
        if isinstance(self.target, Mapping):
            first = next(iter(self.target))
            return dataclasses.replace(self, target={**self.target, first: label})
        return dataclasses.replace(self, target=label)


class Source:
    """Images with names and targets: `splits` lists them, `read` decodes one.

    `splits` has those of "train", "val" and "test" that the data has, and otherwise one list, "all". `columns` has the
    class names of every label column that was asked for, and `class_names` are those of the first; both are empty for
    images without labels.

    Args:
        where: the data as the user named it, for messages.
        notes: what the user should know; printed once when the data is opened.
    """

    flips: bool = True  # whether a mirrored image keeps its label

    def __init__(
        self,
        where: str,
        class_names: Iterable[str],
        splits: dict[str, list[Item]],
        notes: Iterable[str] = (),
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.where = where
        self.class_names = tuple(class_names)
        self.splits = splits
        self.notes = list(notes)
        unnamed = {DEFAULT_COLUMN: self.class_names} if self.class_names else {}
        self.columns = {name: tuple(names) for name, names in (columns or unnamed).items()}

    def read(self, item: Item) -> Image.Image:
        """The image, RGB and upright. What cannot be decoded is a `PatchloomError` with the file and the reason."""
        return decode(self.data(item), self._name(item))

    def picture(self, item: Item, fast: bool = False) -> Picture:
        """What `read` gives, with the same pixels and errors, in the form that takes least time to get.

        That is an array RGBX for a plain JPEG. With `fast` the JPEG stays encoded until its crop is known: cheaper to
        decode then, with slightly different pixels.
        """
        data = self.data(item)
        return self.read(item) if data is None else decode_picture(data, self._name(item), fast)

    def _name(self, item: Item) -> str:
        return str(self.path(item) or f"{item.key} of {self.where}")

    def data(self, item: Item) -> bytes | None:
        """The encoded image; None where the source holds pixels. A missing file is an `UnreadableImage`."""
        path = self.path(item)
        return None if path is None else read_encoded(path)

    def path(self, item: Item) -> Path | None:  # noqa: ARG002 - for sources that have files
        """The file, where there is one."""
        return None

    def size(self, item: Item) -> int | None:
        """The bytes of the encoded image where they cost little to know."""
        path = self.path(item)
        try:
            return path.stat().st_size if path else None
        except OSError:
            return None

    def fingerprint(self) -> str:
        """One value for the data set: it changes with names, targets, splits and sizes, not with the place.

        Sizes stand in for contents: hashing every byte of a large data set would take hours at each start.
        """
        rows = sorted(
            (split, item.key, self.describe_target(item), str(self.size(item)))
            for split, items in self.splits.items()
            for item in items
        )
        digest = hashlib.sha256()
        for row in rows:
            # NUL and newline keep fields and rows apart, so that ("ab", "c") and ("a", "bc") differ.
            digest.update(bytes_of("\0".join(row)) + b"\n")
        return digest.hexdigest()

    def describe_target(self, item: Item) -> str:
        """The target as text, with the names of classes: runs keep their fingerprint if classes change their order."""
        target = item.target
        if isinstance(target, (int, np.integer)) and self.class_names:
            return self.class_names[target]
        if isinstance(target, Mapping) and set(target) <= set(self.columns):
            return "\0".join(f"{column}={self.columns[column][label]}" for column, label in target.items())
        if target is None or isinstance(target, str):
            return target or ""
        return json.dumps(target, sort_keys=True, default=repr)

    @property
    def labelled(self) -> bool:
        """Whether every image has a class."""
        return bool(self.class_names)

    def with_labels(self, column: str) -> Source:
        """A copy whose targets are the classes of one column."""
        if column not in self.columns:
            listed = ", ".join(self.columns) or "none"
            raise PatchloomError(
                f"{self.where} has no label column {column!r}.{did_you_mean(column, self.columns)} "
                f"Label columns: {listed}."
            )
        # A shallow copy: files, arrays and open tables are shared.
        chosen = copy.copy(self)
        chosen.class_names, chosen.columns = self.columns[column], {column: self.columns[column]}
        if len(self.columns) > 1:
            chosen.splits = {
                name: [dataclasses.replace(item, target=item.target[column]) for item in items]
                for name, items in self.splits.items()
            }
        return chosen

    def without(self, bad: Collection[str]) -> Source:
        """A copy that leaves these keys out of every split. The classes stay, so that labels do."""
        gone = frozenset(bad)
        kept = copy.copy(self)
        kept.splits = {name: [item for item in items if item.key not in gone] for name, items in self.splits.items()}
        return kept

    def in_order(self, class_names: Sequence[str]) -> Source:
        """A copy whose labels are places in `class_names`, the same classes in another order."""
        place = {name: i for i, name in enumerate(class_names)}
        label = [place[name] for name in self.class_names]
        other = copy.copy(self)
        other.class_names = tuple(class_names)
        other.columns = {**self.columns, next(iter(self.columns), DEFAULT_COLUMN): other.class_names}
        other.splits = {
            name: [item.with_label(label[item.label]) for item in items] for name, items in self.splits.items()
        }
        return other

    def items(self) -> list[Item]:
        """All images, split after split."""
        return [item for items in self.splits.values() for item in items]


class FileSource(Source):
    """Images in files: a key is a path relative to `root`, or an absolute one."""

    def __init__(self, root: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.root = root

    def path(self, item: Item) -> Path:
        return self.root / item.key


class ArraySource(Source):
    """Images held in memory: the number of an image in `pixels` is the last part of its key."""

    def __init__(self, pixels: dict[str, np.ndarray], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pixels = pixels

    def read(self, item: Item) -> Image.Image:
        split, _, number = item.key.rpartition("/")
        return Image.fromarray(self.pixels[split][int(number)]).convert("RGB")


def bytes_of(text: str) -> bytes:
    """Also for names of files that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def spread(items: Sequence[_T], most: int) -> list[_T]:
    """At most `most` of them, evenly over the whole list: of sorted images, from all classes."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]
