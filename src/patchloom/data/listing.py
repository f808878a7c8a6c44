"""From what a folder, a manifest or an archive lists (keys and names of classes) to the items of a source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from patchloom.data.sources import Item
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.install import pip_install
from patchloom.models.class_names import check_distinct
from patchloom.text import count

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LAYOUTS = """Data can be
  FOLDER/CLASS/image.jpg          a folder with one subfolder per class
  FOLDER/train/CLASS/image.jpg    with val (or valid, validation) and test beside train
  FILE.csv                        a column `path`, a column of labels, perhaps a column `split`
  digits                          scikit-learn's handwritten digits
  torchvision:NAME:FOLDER, wds:SHARDS, hf:FOLDER""".splitlines()

TARGETS = ("class", "none")  # what `open_source` may be asked for
Labels = str | Sequence[str] | None  # the label columns asked for: "species", "genus,species" or a sequence of names
Row = tuple[str, tuple[str, ...]]  # a key, and the name of its class in each column
Rows = dict[str, list[Row]]  # by split


def choose_columns(where: str, available: Sequence[str], labels: Labels, targets: str = "class") -> tuple[str, ...]:
    """The label columns: those asked for, or the only one. With targets "none", data without one column is accepted."""
    listed = ", ".join(available) or "none"
    if labels is not None:
        asked = split_labels(labels, available)
        for name in asked:
            if name not in available:
                raise PatchloomError(
                    f"{where} has no label column {name!r}.{did_you_mean(name, available)} Label columns: {listed}."
                )
        return asked
    if len(available) == 1:
        return (available[0],)
    if targets == "none":
        return ()
    raise PatchloomError(f"{where} must say which column holds the labels (--labels COLUMN). Columns: {listed}.")


def split_labels(labels: str | Sequence[str], available: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that "genus,species" names, each once. A column whose own name has a comma goes before that."""
    if isinstance(labels, str):
        labels = [labels] if labels in available else [name.strip() for name in labels.split(",")]
    return tuple(dict.fromkeys(labels))


def class_columns(
    columns: Iterable[str], found: Rows, order: Callable[[Iterable[str]], list[str]], targets: str = "class"
) -> dict[str, list[str]]:
    """The class names of each column, each once and in `order`: of the rows that are trained on, with targets "none" of
    all."""
    everything = [row for rows in found.values() for row in rows]
    # Classes come from the training images: a class that is only tested could not be learned.
    trained = (found.get("train") if targets == "class" else None) or everything
    return {column: order({names[i] for _, names in trained}) for i, column in enumerate(columns)}


def label_by_name(where: str, columns: Mapping[str, Sequence[str]], found: Rows) -> dict[str, list[Item]]:
    """Items, sorted by key. Labels go by the name of the class; classes that training lacks are refused.

    `columns` has the class names of each label column. With one, the target of an item is an index; with several, a
    dict of indices; without any, None.

    Raises:
        PatchloomError: two classes have one name, or a split has a class that train lacks.
    """
    places = []
    for i, (column, class_names) in enumerate(columns.items()):
        check_distinct(class_names, where)
        places.append({name: number for number, name in enumerate(class_names)})
        for split, rows in found.items():
            _refuse_unknown(where, split, {names[i] for _, names in rows} - set(places[-1]), column, len(columns))
    known: dict[tuple[str, ...], Any] = {}  # one target per combination of labels: millions of images share a few

    def target_of(names: tuple[str, ...]) -> Any:
        if names not in known:
            labels = [place[name] for place, name in zip(places, names, strict=True)]
            known[names] = dict(zip(columns, labels, strict=True)) if len(labels) > 1 else next(iter(labels), None)
        return known[names]

    return {
        split: sorted((Item(key, target_of(names)) for key, names in rows), key=lambda item: item.key)
        for split, rows in found.items()
    }


def _refuse_unknown(where: str, split: str, unknown: set[str], column: str, columns: int) -> None:
    if not unknown:
        return
    names = sorted(unknown)
    shown = ", ".join(map(repr, names[:5])) + (", ..." if names[5:] else "")
    of = f" of {column}" if columns > 1 else ""
    raise PatchloomError(
        f"{where}: {split} has {count(len(names), 'class', 'classes')}{of} that train lacks: {shown}. "
        f"Rename them as in train, add them to train, or leave them out of {split}."
    )


def class_notes(class_names: Sequence[str], splits: dict[str, list[Item]]) -> Iterator[str]:
    """What is worth knowing of the classes: those without images, and whether there is one only."""
    if not class_names:
        return
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
    """A library that only one kind of data needs; where it is missing, the error says how to install it."""
    try:
        if name == "torchvision":
            import_module("patchloom.compat")  # before torchvision, which may not load without it
            return import_module("torchvision.datasets")
        return import_module(name)
    except ImportError as error:
        raise PatchloomError(f"This data needs {name}: {pip_install(name)}") from error
