"""Data sets on disk of Hugging Face's library `datasets`: hf:FOLDER, written by `save_to_disk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchloom.data.decoding import read_encoded
from patchloom.data.listing import SPLIT_NAMES, class_notes, import_library, label_by_name, numbers_first
from patchloom.data.manifest import label_column
from patchloom.data.sources import Item, Source
from patchloom.errors import PatchloomError


class SavedSource(Source):
    """A set of the library `datasets`, memory-mapped; images stay encoded until they are read."""

    def __init__(self, tables: dict[str, Any], column: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables = tables
        self.column = column

    def data(self, item: Item) -> bytes | None:
        split, _, number = item.key.rpartition("/")
        stored = self.tables[split][int(number)][self.column] or {}
        if stored.get("bytes") is None and stored.get("path"):
            return read_encoded(stored["path"], f"{item.key} of {self.where} ({stored['path']})")
        return stored.get("bytes")


def open_saved(rest: str, labels: str | None) -> Source:
    where = f"hf:{rest}"
    folder = Path(rest).expanduser()
    if not folder.is_dir():
        raise PatchloomError(f"{where}: {rest} is no folder; expected one written by save_to_disk.")
    library = import_library("datasets")
    try:
        loaded = library.load_from_disk(str(folder))
    except Exception as error:  # of pyarrow, datasets or json
        raise PatchloomError(f"{where} cannot be opened as a data set written by save_to_disk: {error}") from error
    notes: list[str] = []
    tables = _saved_splits(where, loaded, notes) if isinstance(loaded, dict) else {"all": loaded}
    features = next(iter(tables.values())).features
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    if len(images) != 1:
        raise PatchloomError(f"{where} needs one column of images; its columns: {', '.join(features)}.")
    column = _saved_label_column(where, library, features, images[0], labels)
    found = {split: _saved_rows(split, table, column, notes) for split, table in tables.items()}
    class_names = _saved_class_names(features[column], found)
    splits = {name: items for name, items in label_by_name(where, class_names, found).items() if items}
    undecoded = library.Image(decode=False)
    encoded = {name: tables[name].select_columns(images).cast_column(images[0], undecoded) for name in splits}
    all_notes = [*notes, *class_notes(class_names, splits)]
    return SavedSource(encoded, images[0], where, class_names, splits, all_notes)


def _saved_splits(where: str, loaded: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    tables = {SPLIT_NAMES[name.lower()]: table for name, table in loaded.items() if name.lower() in SPLIT_NAMES}
    unused = [name for name in loaded if name.lower() not in SPLIT_NAMES]
    if not tables:
        raise PatchloomError(f"{where} has the splits {', '.join(unused)}; expected train, validation or test.")
    if unused:
        notes.append(f"Splits left aside: {', '.join(unused)}.")
    return {split: tables[split] for split in ("train", "val", "test") if split in tables}


def _saved_label_column(where: str, library: Any, features: Any, image: str, labels: str | None) -> str:
    plain = [n for n, kind in features.items() if n != image and isinstance(kind, (library.ClassLabel, library.Value))]
    classes = [name for name in plain if isinstance(features[name], library.ClassLabel)]
    named = [name for name in plain if name in ("label", "labels")]
    if labels is None:
        for choice in (classes, named):
            if len(choice) == 1:
                return choice[0]
    return label_column(where, plain, labels)


def _saved_rows(split: str, table: Any, column: str, notes: list[str]) -> list[tuple[str, str]]:
    kind = table.features[column]
    values = table.select_columns([column]).with_format(None)[:][column]
    names = getattr(kind, "names", None)
    rows = [
        (f"{split}/{number}", names[value] if names else str(value))
        for number, value in enumerate(values)
        if value is not None and not (names and value < 0)  # -1: how public sets hide the labels of their tests
    ]
    if len(rows) < len(values):
        notes.append(f"{len(values) - len(rows)} images of {split} without a label left aside.")
    return rows


def _saved_class_names(kind: Any, found: dict[str, list[tuple[str, str]]]) -> list[str]:
    if getattr(kind, "names", None):
        return list(kind.names)
    trained = found.get("train") or [row for rows in found.values() for row in rows]
    return numbers_first(name for _, name in trained)
