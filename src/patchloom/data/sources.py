"""Where labelled images come from, and how they are split.

Class folders are in `folders`, CSV files in `manifest`, other sets (torchvision's, tar shards, Hugging Face's) in
`archives`.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.decoding import decode, decode_picture, read_encoded
from patchloom.data.images import Picture
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.install import pip_install
from patchloom.models.class_names import check_distinct

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LAYOUTS = """Data can be
  FOLDER/CLASS/image.jpg          a folder a class
  FOLDER/train/CLASS/image.jpg    with val (or valid, validation) and test beside train
  FILE.csv                        a column `path`, a column of labels, perhaps a column `split`
  digits                          scikit-learn's handwritten digits
  torchvision:NAME:FOLDER, wds:SHARDS, hf:FOLDER""".splitlines()

_FIFTH = 5

Rows = dict[str, list[tuple[str, str]]]  # for each split, keys with the names of their classes


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
            digest.update(_bytes_of("\0".join(row)) + b"\n")
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


def open_source(where: str | PathLike[str], labels: str | None = None) -> Source:
    """The labelled images at `where`: a folder, a CSV manifest, "digits", or one of the prefixes of `archives`.

    `labels` names the column of labels where there are several.
    """
    name = os.fspath(where)
    if not name or "\0" in name:
        what = "a name with a NUL byte" if name else "an empty name"
        raise PatchloomError(f"There is no data with {what}.", *LAYOUTS)
    if isinstance(where, str):
        if name == "digits":
            _refuse_labels(name, labels)
            return _open_digits()
        prefix, _, rest = name.partition(":")
        if prefix in ("torchvision", "wds", "hf"):
            from patchloom.data import archives

            return archives.open_archive(prefix, rest, labels)
    path = Path(name).expanduser()
    if path.is_dir():
        _refuse_labels(name, labels)
        from patchloom.data.folders import open_folder  # it builds on this file, as do the others

        return open_folder(name, path)
    if path.is_file():
        from patchloom.data.manifest import open_manifest

        return open_manifest(name, path, labels)
    if path.exists():
        raise PatchloomError(f"{name} is neither a folder nor a regular file.", *LAYOUTS)
    raise PatchloomError(f"{name} does not exist.{_near(path)}", *LAYOUTS)


def _bytes_of(text: str) -> bytes:
    """Also for names of files that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _refuse_labels(name: str, labels: str | None) -> None:
    if labels is not None:
        raise PatchloomError(
            f"Labels {labels!r}: only a CSV manifest, wds: and hf: have label columns; {name} has none."
        )


def _near(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""


# --- digits


def _open_digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PatchloomError(f"The data set digits needs scikit-learn: {pip_install('scikit-learn')}") from error
    images, labels = load_digits(return_X_y=True)
    pixels = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(pixels))  # RandomState: the same order in every version of numpy
    held_out = len(pixels) // _FIFTH

    def items(numbers: np.ndarray) -> list[Item]:
        return [Item(str(number), int(labels[number])) for number in sorted(numbers.tolist())]

    splits = {"train": items(order[held_out:]), "val": items(order[:held_out])}
    source = ArraySource({"": pixels}, "digits", map(str, range(10)), splits)
    source.flips = False
    return source


# --- what folders, manifests and archives share


def label_by_name(where: str, class_names: Sequence[str], found: Rows) -> dict[str, list[Item]]:
    """Items, sorted by key, from (key, name of class). Labels go by name; what training lacks is refused."""
    check_distinct(class_names, where)
    index = {name: number for number, name in enumerate(class_names)}
    for split, rows in found.items():
        unknown = sorted({name for _, name in rows} - set(index))
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if unknown[5:] else "")
            raise PatchloomError(
                f"{where}: {split} has {count(len(unknown), 'class', 'classes')} that train lacks: {shown}. "
                f"Rename them as in train, add them to train, or leave them out of {split}."
            )
    return {split: sorted((Item(k, index[n]) for k, n in rows), key=lambda i: i.key) for split, rows in found.items()}


def class_notes(class_names: Sequence[str], splits: dict[str, list[Item]]) -> Iterator[str]:
    """What is worth knowing of the classes: those without images, and whether there is one only."""
    counts = Counter(item.label for items in splits.values() for item in items)
    empty = [name for label, name in enumerate(class_names) if not counts[label]]
    if empty:
        yield f"{count(len(empty), 'class', 'classes')} without images: {', '.join(empty)}."
    if len(class_names) == 1:
        yield f"There is one class only, {class_names[0]}."


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, as the end of a sentence."""
    return ", ".join(names[:most]) + (", ..." if names[most:] else ".")


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of them, evenly over the whole list: of sorted images, from all classes."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]


@dataclass(frozen=True)
class Splits:
    """Which splits are asked for, several joined as "train+val"; None: the data's own, see `split_source`."""

    train: str | None = None
    test: str | None = None
    hold_out: float | str | None = None  # share of each class of the training split; 0 or "none": nothing

    def __post_init__(self) -> None:
        if self.hold_out is None:
            return
        if self.test is not None:
            raise PatchloomError(
                f"--test-split {self.test} and --hold-out {self.hold_out} exclude each other: give one."
            )
        try:
            share = 0.0 if self.hold_out == "none" else float(self.hold_out)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1 or (share == 0 and isinstance(self.hold_out, str) and self.hold_out != "none"):
            raise PatchloomError(f"--hold-out is none or a fraction between 0 and 1, not {self.hold_out!r}.")
        object.__setattr__(self, "hold_out", share)


@dataclass(frozen=True)
class Split:
    """What to train on and what to measure on; `how` is one sentence that a command prints."""

    train: list[Item]
    held_out: list[Item]
    how: str
    train_name: str = "train"
    test_name: str | None = None  # None: held out of the training split


def split_names(source: Source, asked: str) -> tuple[str, ...]:
    """The splits that "train+val" names; "all" is every split. One that the data lacks is refused."""
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
    each class is held out: the same files on every machine and in every run."""
    asked, splits = asked or Splits(), source.splits
    train_names = split_names(source, asked.train or ("train" if splits.get("train") else "all"))
    if asked.train is None and train_names not in (("train",), ("all",)):
        raise PatchloomError(f"{source.where} has no training images; it has {', '.join(splits) or 'nothing'}.")
    test_names = _test_names(source, asked, train_names)
    train, train_name = join_splits(source, train_names), "+".join(train_names)
    if test_names:
        held_out, of = join_splits(source, test_names), "" if train_name == "train" else f" of {train_name}"
        test_name = "+".join(test_names)
        how = f"{len(train)} images{of} to train on; {len(held_out)} of the data's own split {test_name} held out."
        return Split(train, held_out, how, train_name, test_name)
    if asked.hold_out == 0:
        return Split(
            train, [], f"All {len(train)} images of {train_name} are trained on; none is held out.", train_name
        )
    share = float(asked.hold_out or 1 / _FIFTH)
    held_keys = _share_of_each_class(train, share)
    if not held_keys:
        how = f"No class has two images: all {len(train)} are trained on, and measured on too."
        return Split(train, train, how, train_name)
    kept = [item for item in train if item.key not in held_keys]
    held_out = [item for item in train if item.key in held_keys]
    begin = "No split in the data: a fifth" if asked.hold_out is None else f"A share of {share:g}"
    how = (
        f"{begin} of each class, {count(len(held_out), 'image')}, held out, chosen by file name; "
        f"{len(kept)} to train on."
    )
    return Split(kept, held_out, how, train_name)


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


def _share_of_each_class(items: list[Item], share: float) -> set[str]:
    by_class: dict[int, list[str]] = defaultdict(list)
    for item in items:
        by_class[item.label].append(item.key)
    exact = Fraction(str(share))
    held: set[str] = set()
    for keys in by_class.values():
        if len(keys) > 1:
            keys.sort(key=lambda key: hashlib.sha256(_bytes_of(key)).digest())
            held.update(keys[: max(1, int(len(keys) * exact))])
    return held
