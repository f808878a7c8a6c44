"""Data sets on disk of Hugging Face's library `datasets`: hf:FOLDER, written by `save_to_disk`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchloom.data.decoding import read_encoded
from patchloom.data.listing import (
    SPLIT_NAMES,
    Labels,
    Row,
    choose_columns,
    class_columns,
    class_notes,
    import_library,
    label_by_name,
    numbers_first,
)
from patchloom.data.sources import Item, Source
from patchloom.errors import PatchloomError
from patchloom.text import count


class SavedSource(Source):
    """A set of the library `datasets`, memory-mapped; images stay encoded until they are read."""

    def __init__(self, tables: dict[str, Any], column: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables = tables
        self.column = column

    def data(self, item: Item) -> bytes | None:
        split, _, number = item.key.rpartition("/")
        # Arrow maps the file into memory: an entry is read from disk only now.
        stored = self.tables[split][int(number)][self.column] or {}
        if stored.get("bytes") is None and stored.get("path"):
            return read_encoded(stored["path"], f"{item.key} of {self.where} ({stored['path']})")
        return stored.get("bytes")


def open_saved(rest: str, labels: Labels = None, targets: str = "class") -> Source:
    """The images of a data set on disk, in its one column of images.

    Raises:
        PatchloomError: not such a folder, the library is missing, or the columns of images or labels are not clear.
    """
    where = f"hf:{rest}"
    folder = Path(rest).expanduser()
    if not folder.is_dir():
        raise PatchloomError(f"{where}: {rest} is not a folder; expected one written by save_to_disk.")
    library = import_library("datasets")
    try:
        loaded = library.load_from_disk(str(folder))
    except Exception as error:  # of pyarrow, datasets or json
        raise PatchloomError(f"{where} cannot be opened as a data set written by save_to_disk: {error}") from error
    notes: list[str] = []
    tables = _saved_splits(where, loaded, notes) if isinstance(loaded, dict) else {"all": loaded}
    # All splits of a set have the same columns.
    features = next(iter(tables.values())).features
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    if len(images) != 1:
        raise PatchloomError(f"{where} needs one column of images; its columns: {', '.join(features)}.")
    chosen = _saved_label_columns(where, library, features, images[0], labels, targets)
    unlabelled = 0
    if targets == "none" and labels is None:
        unlabelled = sum(len(table) - len(_saved_rows(split, table, chosen, [])) for split, table in tables.items())
        if unlabelled:
            notes.append(f"{count(unlabelled, 'image')} without a label: no labels are used.")
            chosen = ()
    found = {split: _saved_rows(split, table, chosen, notes) for split, table in tables.items()}
    columns = {
        column: list(features[column].names) if getattr(features[column], "names", None) else names
        for column, names in class_columns(chosen, found, numbers_first, targets).items()
    }
    class_names = next(iter(columns.values()), [])
    splits = {name: items for name, items in label_by_name(where, columns, found).items() if items}
    undecoded = library.Image(decode=False)
    # decode=False gives the bytes of the file: decoding is ours, with the same pixels for every kind of source.
    encoded = {name: tables[name].select_columns(images).cast_column(images[0], undecoded) for name in splits}
    all_notes = [*notes, *class_notes(class_names, splits)]
    return SavedSource(encoded, images[0], where, class_names, splits, all_notes, columns)


def _saved_splits(where: str, loaded: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    tables = {SPLIT_NAMES[name.lower()]: table for name, table in loaded.items() if name.lower() in SPLIT_NAMES}
    unused = [name for name in loaded if name.lower() not in SPLIT_NAMES]
    if not tables:
        raise PatchloomError(f"{where} has the splits {', '.join(unused)}; expected train, validation or test.")
    if unused:
        notes.append(f"Splits skipped: {', '.join(unused)}.")
    return {split: tables[split] for split in ("train", "val", "test") if split in tables}


def _saved_label_columns(
    where: str, library: Any, features: Any, image: str, labels: Labels, targets: str
) -> tuple[str, ...]:
    plain = [n for n, kind in features.items() if n != image and isinstance(kind, (library.ClassLabel, library.Value))]
    classes = [name for name in plain if isinstance(features[name], library.ClassLabel)]
    named = [name for name in plain if name in ("label", "labels")]
    if labels is None:
        for choice in (classes, named):
            if len(choice) == 1:
                return (choice[0],)
    if labels is None and targets == "none":
        return ()  # a column of values, such as a caption, is taken for labels only where labels are wanted
    return choose_columns(where, plain, labels)


def _saved_rows(split: str, table: Any, columns: Sequence[str], notes: list[str]) -> list[Row]:
    """Keys and names of classes; images without one of the labels are skipped."""
    values = [_saved_labels(table, column) for column in columns]
    rows = [
        (f"{split}/{number}", tuple(str(name) for name in names))
        for number, names in enumerate(zip(*values, strict=True) if values else [()] * len(table))
        if None not in names
    ]
    if len(rows) < len(table):
        notes.append(f"{len(table) - len(rows)} images of {split} without a label skipped.")
    return rows


def _saved_labels(table: Any, column: str) -> list[str | None]:
    """The names of a column's classes, row by row. Public sets hide the labels of their test images as -1: None."""
    values = table.select_columns([column]).with_format(None)[:][column]
    names = getattr(table.features[column], "names", None)
    if names:
        return [None if value is None or value < 0 else names[value] for value in values]
    return [None if value is None else str(value) for value in values]
