"""A source lists the images of a data set, by split, and reads any one of them.

`opening` makes the sources of folders, files and archives, `splits` chooses what to train on and what to hold out.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.decoding import decode, decode_picture, read_encoded
from patchloom.data.images import Picture


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled image of a source."""

    key: str  # stable name within the source: the path relative to it, or a number
    label: int  # index into class_names


class Source:
    """Labelled images with names: `splits` lists them, `read` decodes one.

    `splits` has those of "train", "val" and "test" that the data has, and otherwise one list, "all".
    """

    flips: bool = True  # whether a mirrored image keeps its label

    def __init__(
        self, where: str, class_names: Iterable[str], splits: dict[str, list[Item]], notes: Iterable[str] = ()
    ) -> None:
        self.where = where
        self.class_names = tuple(class_names)
        self.splits = splits
        self.notes = list(notes)

    def read(self, item: Item) -> Image.Image:
        """The image, RGB and upright. What cannot be decoded is a `PatchloomError` with the file and the reason."""
        return decode(self.data(item), self._name(item))

    def picture(self, item: Item, fast: bool = False) -> Picture:
        """What `read` gives, with the same pixels and errors, in the form that takes least time to get.

        That is an array RGBX for a plain JPEG; with `fast`, one that is decoded when its crop is known, with others.
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
        """One value for the data set: it changes with names, labels, splits and sizes, not with the place."""
        rows = sorted(
            (split, item.key, self.class_names[item.label], str(self.size(item)))
            for split, items in self.splits.items()
            for item in items
        )
        digest = hashlib.sha256()
        for row in rows:
            digest.update(bytes_of("\0".join(row)) + b"\n")
        return digest.hexdigest()

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
        other.splits = {
            name: [dataclasses.replace(item, label=label[item.label]) for item in items]
            for name, items in self.splits.items()
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
    """Also for names of files that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of them, evenly over the whole list: of sorted images, from all classes."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]
