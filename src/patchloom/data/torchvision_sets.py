"""torchvision's data sets: torchvision:NAME:FOLDER. Nothing is downloaded, and torchvision is imported on use."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patchloom.data.listing import Labels, Rows, choose_columns, class_notes, import_library, label_by_name
from patchloom.data.sources import DEFAULT_COLUMN, ArraySource, FileSource, Item, Source
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.reading import read_json
from patchloom.text import count

# for each set, its splits with torchvision's arguments for them
_TORCHVISION: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": {"train": {"train": True}, "test": {"train": False}},
    "CIFAR100": {"train": {"train": True}, "test": {"train": False}},
    "Flowers102": {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}},
    "StanfordCars": {"train": {"split": "train"}, "test": {"split": "test"}},
    "Food101": {"train": {"split": "train"}, "test": {"split": "test"}},
    "INaturalist": {},  # what is there decides: see _inaturalist_splits
    "ImageNet": {"train": {"split": "train"}, "val": {"split": "val"}},
}


# the label columns of the sets that have more than one; the first is the default
_LEVELS = {
    "CIFAR100": ("fine", "coarse"),
    "INaturalist 2021": ("species", "kingdom", "phylum", "class", "order", "family", "genus"),
    "INaturalist": ("species", "super"),  # 2017 to 2019
}


def open_torchvision(rest: str, labels: Labels = None) -> Source:
    """The data set NAME:FOLDER of torchvision. CIFAR100 and INaturalist have several label columns.

    Raises:
        PatchloomError: an unknown set, a folder without its files, or labels that the set does not have.
    """
    name, _, folder = rest.partition(":")
    where = f"torchvision:{rest}"
    if name not in _TORCHVISION:
        known = ", ".join(_TORCHVISION)
        raise PatchloomError(f"torchvision:{name} is not known.{did_you_mean(name, _TORCHVISION)} Known: {known}.")
    if labels is not None and name not in _LEVELS:
        raise PatchloomError(f"Labels {labels!r}: torchvision:{name} has no label columns.")
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        raise PatchloomError(f"torchvision:{name}:FOLDER needs the folder that holds the set; got {folder!r}.")
    library = import_library("torchvision")
    opened = {}
    for split, arguments in _torchvision_splits(name, root).items():
        try:
            opened[split] = getattr(library, name)(root, **arguments, **_options(name))
        except Exception as error:  # torchvision and what it reads with raise errors of every kind
            raise PatchloomError(
                f"torchvision cannot open {name} in {folder}: {error}. patchloom downloads nothing; "
                f"put the set's files there first."
            ) from error
    columns = _columns(where, name, opened, labels)
    if name.startswith("CIFAR"):
        return _from_arrays(where, opened, columns)
    source = _from_files(where, root, opened, columns)
    return _as_annotated(source, root) if name == "INaturalist" and "all" in source.splits else source


def _columns(where: str, name: str, opened: dict[str, Any], labels: Labels) -> tuple[str, ...]:
    """The label columns asked for, or the default."""
    version = str(getattr(next(iter(opened.values())), "version", ""))
    levels = _LEVELS.get(f"{name} {version[:4]}") or _LEVELS.get(name, (DEFAULT_COLUMN,))
    return levels[:1] if labels is None else choose_columns(where, levels, labels)


def _options(name: str) -> dict[str, Any]:
    """No downloads; and a "loader" that gives the path, so that reading an entry costs nothing."""
    # ImageNet's class has no argument "download".
    options: dict[str, Any] = {} if name == "ImageNet" else {"download": False}
    return options if name.startswith("CIFAR") else {**options, "loader": os.fspath}


def _torchvision_splits(name: str, root: Path) -> dict[str, dict[str, Any]]:
    splits = _inaturalist_splits(root) if name == "INaturalist" else _TORCHVISION[name]
    if name == "ImageNet":  # torchvision would begin to unpack the archive of a split that is not there
        splits = {split: arguments for split, arguments in splits.items() if (root / split).is_dir()}
    if not splits:
        raise PatchloomError(f"{root} has no part of {name} that torchvision knows.")
    return splits


def _inaturalist_splits(root: Path) -> dict[str, dict[str, Any]]:
    for train in ("2021_train", "2021_train_mini"):
        if (root / train).is_dir():
            held_out = {"val": {"version": "2021_valid"}} if (root / "2021_valid").is_dir() else {}
            return {"train": {"version": train}, **held_out}
    years = ("2019", "2018", "2017")
    return next(({"all": {"version": year}} for year in years if (root / year).is_dir()), {})


def _as_annotated(source: FileSource, root: Path) -> FileSource:
    """iNaturalist 2017 to 2019 with the split of its own annotations, train2018.json and val2018.json, if there."""
    year = source.splits["all"][0].key.partition("/")[0]
    files = {split: _annotations(root, year, split) for split in ("train", "val")}
    missing = [f"{split}{year}.json" for split, file in files.items() if file is None]
    if len(missing) == 2:
        source.notes.append(f"{' and '.join(missing)} are not in {root}: the official split is not known.")
        return source
    if missing:
        raise PatchloomError(f"{root} lacks {missing[0]}: the official split needs the annotations of train and val.")
    inside = {item.key.partition("/")[2]: item for item in source.splits["all"]}
    splits: dict[str, list[Item]] = {}
    for split, file in files.items():
        assert file is not None
        names = _annotated_files(file)
        splits[split] = sorted((inside[name] for name in names if name in inside), key=lambda item: item.key)
        if not splits[split]:
            raise PatchloomError(f"{file} names no image that is in {root / year}.")
        if absent := len(names) - len(splits[split]):
            source.notes.append(f"{count(absent, 'image')} of {file.name} not in {root / year}.")
    if unnamed := len(inside) - sum(map(len, splits.values())):
        source.notes.append(f"{count(unnamed, 'image')} without an annotation skipped.")
    source.splits = splits
    return source


def _annotations(root: Path, year: str, split: str) -> Path | None:
    name = f"{split}{year}.json"
    return next((file for file in (root / name, root / year / name) if file.is_file()), None)


def _annotated_files(file: Path) -> set[str]:
    """The files of an annotation, without their first folder: train_val2018/Aves/1/a.jpg is 2018/Aves/1/a.jpg here."""
    try:
        return {str(entry["file_name"]).partition("/")[2] for entry in read_json(file)["images"]}
    except (ValueError, KeyError, TypeError) as error:
        raise PatchloomError(f"{file} cannot be read as annotations of iNaturalist: {error!r}.") from error


def _from_arrays(where: str, opened: dict[str, Any], columns: tuple[str, ...]) -> Source:
    class_names = {column: _cifar_class_names(next(iter(opened.values())), column) for column in columns}
    splits = {}
    for split, data in opened.items():
        per_column = [_cifar_labels(data, column) for column in columns]
        targets: Iterable[Any] = per_column[0]
        if len(columns) > 1:
            targets = (dict(zip(columns, labels, strict=True)) for labels in zip(*per_column, strict=True))
        splits[split] = [Item(f"{split}/{number}", target) for number, target in enumerate(targets)]
    arrays = {split: data.data for split, data in opened.items()}
    return ArraySource(arrays, where, class_names[columns[0]], splits, (), class_names)


def _cifar_class_names(data: Any, column: str) -> list[str]:
    if column != "coarse":
        return list(data.classes)
    return list(_unpickled(data, data.meta["filename"])["coarse_label_names"])


def _cifar_labels(data: Any, column: str) -> list[int]:
    if column != "coarse":
        return [int(label) for label in data.targets]
    files = [name for name, _ in (data.train_list if data.train else data.test_list)]
    return [int(label) for name in files for label in _unpickled(data, name)["coarse_labels"]]


def _unpickled(data: Any, file: str) -> dict[str, Any]:
    """A file of CIFAR-100 that torchvision has compared with the checksum of the real one, and unpickled, before."""
    path = Path(data.root, data.base_folder, file)
    try:
        return pickle.loads(path.read_bytes(), encoding="latin1")
    except (OSError, pickle.UnpicklingError) as error:
        raise PatchloomError(f"{path} cannot be read: {error}.") from error


def _from_files(where: str, root: Path, opened: dict[str, Any], columns: tuple[str, ...]) -> FileSource:
    found: Rows = {}
    for split, data in opened.items():
        names = list(zip(*(_names_by_label(data, column) for column in columns), strict=True))
        # `loader` gave the path instead of the pixels, so that this reads no image.
        entries = (data[number] for number in range(len(data)))
        found[split] = [(Path(os.path.relpath(path, root)).as_posix(), names[int(label)]) for path, label in entries]
    first = next(iter(opened.values()))
    class_names = {column: _level_names(first, column) for column in columns}
    splits = label_by_name(where, class_names, found)
    main = class_names[columns[0]]
    return FileSource(root, where, main, splits, class_notes(main, splits), class_names)


def _level_names(data: Any, column: str) -> list[str]:
    """The class names of a column of iNaturalist above its species, and otherwise those of the set itself."""
    return list(data.categories_index[column]) if column in _index(data) else _class_names(data)


def _names_by_label(data: Any, column: str) -> list[str]:
    """For each label that the set itself gives, the name of its class in a column."""
    if column not in _index(data):
        return _class_names(data)
    names = _level_names(data, column)
    return [names[levels[column]] for levels in data.categories_map]


def _index(data: Any) -> dict[str, Any]:
    return getattr(data, "categories_index", {})


def _class_names(data: Any) -> list[str]:
    """Different names for different classes: names that classes share, as the two cranes of ImageNet, get their ids."""
    names = [
        ", ".join(name) if isinstance(name, tuple) else str(name)
        for name in (getattr(data, "classes", None) or data.all_categories)
    ]
    counts = Counter(names)
    ids = getattr(data, "wnids", range(len(names)))
    return [f"{name} ({which})" if counts[name] > 1 else name for name, which in zip(names, ids, strict=True)]
