"""Label columns of an index or an evaluation: opened together, checked as levels of a hierarchy, as class numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.levels import parents
from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.search.storage import Column

Labels = str | Sequence[str] | None


def column_list(labels: Labels) -> list[str]:
    """The columns that are named, one by one or as "genus,species", each once."""
    if labels is None:
        return []
    named = [labels] if isinstance(labels, str) or not isinstance(labels, Iterable) else list(labels)
    if other := [name for name in named if not isinstance(name, str)]:
        raise PatchloomError(f"labels names columns by text, not {type(other[0]).__name__}.")
    return list(dict.fromkeys(part.strip() for name in named for part in name.split(",")))


def open_labelled(data: str | PathLike[str] | Any, labels: Labels) -> Source:
    """The images with these label columns; without any, with the labels that the data has of itself, or none.

    A data set without named columns (class folders, digits) has one, `label`.
    """
    named = column_list(labels)
    if not named:
        return open_source(data, targets="none")
    if named == ["label"]:
        source = open_source(data, None if _unnamed(data) else named, targets="none")
    else:
        # Queries may have classes that the collection lacks: nothing is learned here, they just have no relevant item.
        source = open_source(data, named, targets="none")
    for column in named:
        source.with_labels(column)  # names a column that is missing
    return source


def _unnamed(data: Any) -> bool:
    """Whether the data has labels without a column: everything but a CSV manifest and archives."""
    return str(data) == "digits" or (isinstance(data, str | PathLike) and Path(data).is_dir())


def labels_of(source: Source, items: Sequence[Item]) -> dict[str, Column]:
    """The labels of items in every column of their source."""
    found = {}
    for name, names in source.columns.items():
        numbers = [_label(item, name) for item in items]
        found[name] = Column(tuple(names), np.asarray(numbers, np.int32).reshape(-1))
    return found


def _label(item: Item, column: str) -> int:
    target = item.target
    if isinstance(target, Mapping):
        return int(target[column])
    return -1 if target is None else int(target)


def conflicts(source: Source) -> list[str]:
    """For every pair of columns where one could be a level above the other, what contradicts it: a class that lies in
    more than one class of the level above, by name.

    Columns without any relation, such as species and photographer, are not levels: there nearly every class would be in
    conflict. A pair is reported if at least half of the finer classes lie in one coarser class.
    """
    columns = sorted(source.columns, key=lambda name: len(source.columns[name]))
    return [
        message
        for i, coarse in enumerate(columns)
        for fine in columns[i + 1 :]
        if (message := _conflict(source, fine, coarse))
    ]


def _conflict(source: Source, fine: str, coarse: str) -> str | None:
    try:
        parents(source, fine, coarse)
        return None
    except PatchloomError as error:
        above: dict[int, set[int]] = {}
        for item in source.items():
            above.setdefault(_label(item, fine), set()).add(_label(item, coarse))
        single = sum(len(some) == 1 for some in above.values())
        return str(error) if 2 * single >= len(above) else None


def find_column(columns: Iterable[str], name: str, where: Any) -> str:
    """The column with this name, or an error that lists those that there are."""
    known = list(columns)
    if not isinstance(name, str):
        raise PatchloomError(f"A label column is named by text, not {type(name).__name__}.")
    if name not in known:
        raise PatchloomError(
            f"{where} has no label column {name!r}.{did_you_mean(name, known)} "
            f"Label columns: {', '.join(known) or 'none'}."
        )
    return name


def find_class(column: Column, name: str, called: str) -> int:
    """The number of a class by its name."""
    if name not in column.names:
        known = ", ".join(column.names[:20]) + (", ..." if len(column.names) > 20 else "")
        raise PatchloomError(
            f"{called} has no class {name!r}.{did_you_mean(name, column.names)} Classes: {known or 'none'}."
        )
    return column.names.index(name)
