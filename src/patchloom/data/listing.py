"""From what a folder, a manifest or an archive lists (keys and names of classes) to the items of a source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from patchloom.data.sources import Item
from patchloom.errors import PatchloomError
from patchloom.install import pip_install
from patchloom.models.network import check_distinct
from patchloom.text import count

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LAYOUTS = """Data can be
  FOLDER/CLASS/image.jpg          a folder a class
  FOLDER/train/CLASS/image.jpg    with val (or valid, validation) and test beside train
  FILE.csv                        a column `path`, a column of labels, perhaps a column `split`
  digits                          scikit-learn's handwritten digits
  torchvision:NAME:FOLDER, wds:SHARDS, hf:FOLDER""".splitlines()

Rows = dict[str, list[tuple[str, str]]]  # for each split, keys with the names of their classes


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


def numbers_first(names: Iterable[str]) -> list[str]:
    """Sorted; where all are whole numbers, by value, so that 10 follows 9."""
    distinct = set(names)
    whole = all(re.fullmatch(r"-?\d+", name) for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name) if whole else (0, name))


def import_library(name: str) -> Any:
    try:
        if name == "torchvision":
            import_module("patchloom.compat")  # before torchvision, which may not load without it
            return import_module("torchvision.datasets")
        return import_module(name)
    except ImportError as error:
        raise PatchloomError(f"This data needs {name}: {pip_install(name)}") from error
