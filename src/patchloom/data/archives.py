"""Labelled images kept in other ways than loose files: torchvision's sets, tar shards, Hugging Face's sets on disk.

    torchvision:CIFAR10:FOLDER           nothing is downloaded
    wds:FOLDER/shards-{000..003}.tar     or a folder of .tar files
    hf:FOLDER                            written by `save_to_disk` of `datasets`

The libraries are imported only when one of these is opened.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from patchloom.data.decoding import EXTENSIONS, MOST_BYTES, UnreadableImage, read_encoded
from patchloom.data.manifest import label_column
from patchloom.data.sources import (
    SPLIT_NAMES,
    ArraySource,
    FileSource,
    Item,
    Rows,
    Source,
    class_notes,
    count,
    label_by_name,
    some,
)
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.install import pip_install
from patchloom.reading import parse_json, read_json

_MOST_TEXT = 1 << 20  # bytes of a label in a shard


def open_archive(prefix: str, rest: str, labels: str | None = None) -> Source:
    """The source that `prefix:rest` names."""
    if prefix == "torchvision":
        return _open_torchvision(rest, labels)
    if not rest:
        raise PatchloomError(f"{prefix}: needs a path, as in {prefix}:/data/flowers.")
    return _open_shards(rest, labels) if prefix == "wds" else _open_saved(rest, labels)


def _library(name: str) -> Any:
    try:
        if name == "torchvision":
            import_module("patchloom.compat")  # before torchvision, which may not load without it
            return import_module("torchvision.datasets")
        return import_module(name)
    except ImportError as error:
        raise PatchloomError(f"This data needs {name}: {pip_install(name)}") from error


def _numbers_first(names: Iterable[str]) -> list[str]:
    """Sorted; where all are whole numbers, by value, so that 10 follows 9."""
    distinct = set(names)
    whole = all(re.fullmatch(r"-?\d+", name) for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name) if whole else (0, name))


# --- torchvision

# for each set, its splits with torchvision's arguments for them
_MOST_SHARDS = 100_000
_TORCHVISION: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": {"train": {"train": True}, "test": {"train": False}},
    "CIFAR100": {"train": {"train": True}, "test": {"train": False}},
    "Flowers102": {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}},
    "StanfordCars": {"train": {"split": "train"}, "test": {"split": "test"}},
    "Food101": {"train": {"split": "train"}, "test": {"split": "test"}},
    "INaturalist": {},  # what is there decides: see _inaturalist_splits
    "ImageNet": {"train": {"split": "train"}, "val": {"split": "val"}},
}


def _open_torchvision(rest: str, labels: str | None) -> Source:
    name, _, folder = rest.partition(":")
    where = f"torchvision:{rest}"
    if name not in _TORCHVISION:
        known = ", ".join(_TORCHVISION)
        raise PatchloomError(f"torchvision:{name} is not known.{did_you_mean(name, _TORCHVISION)} Known: {known}.")
    if labels is not None:
        raise PatchloomError(f"Labels {labels!r}: torchvision's sets have no label columns.")
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        raise PatchloomError(f"torchvision:{name}:FOLDER needs the folder that holds the set; got {folder!r}.")
    library = _library("torchvision")
    opened = {}
    for split, arguments in _torchvision_splits(name, root).items():
        try:
            opened[split] = getattr(library, name)(root, **arguments, **_options(name))
        except Exception as error:  # torchvision and what it reads with raise errors of every kind
            raise PatchloomError(
                f"torchvision cannot open {name} in {folder}: {error}. patchloom downloads nothing; "
                f"put the set's files there first."
            ) from error
    if name.startswith("CIFAR"):
        return _from_arrays(where, opened)
    source = _from_files(where, root, opened)
    return _as_annotated(source, root) if name == "INaturalist" and "all" in source.splits else source


def _options(name: str) -> dict[str, Any]:
    """No downloads; and a "loader" that gives the path, so that reading an entry costs nothing."""
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
        source.notes.append(f"{count(unnamed, 'image')} without an annotation left aside.")
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


def _from_arrays(where: str, opened: dict[str, Any]) -> Source:
    class_names = next(iter(opened.values())).classes
    splits = {
        split: [Item(f"{split}/{number}", int(label)) for number, label in enumerate(data.targets)]
        for split, data in opened.items()
    }
    return ArraySource({split: data.data for split, data in opened.items()}, where, class_names, splits)


def _from_files(where: str, root: Path, opened: dict[str, Any]) -> FileSource:
    found: dict[str, list[tuple[str, str]]] = {}
    for split, data in opened.items():
        names = _class_names(data)
        entries = (data[number] for number in range(len(data)))
        found[split] = [(Path(os.path.relpath(path, root)).as_posix(), names[int(label)]) for path, label in entries]
    class_names = _class_names(next(iter(opened.values())))
    splits = label_by_name(where, class_names, found)
    return FileSource(root, where, class_names, splits, class_notes(class_names, splits))


def _class_names(data: Any) -> list[str]:
    """Different names for different classes: ImageNet has two called crane."""
    names = [
        ", ".join(name) if isinstance(name, tuple) else str(name)
        for name in (getattr(data, "classes", None) or data.all_categories)
    ]
    counts = Counter(names)
    ids = getattr(data, "wnids", range(len(names)))
    return [f"{name} ({which})" if counts[name] > 1 else name for name, which in zip(names, ids, strict=True)]


# --- WebDataset tar shards


class ShardSource(Source):
    """Images inside tar files, found by an index of their places, so that any one of them can be read at any time."""

    def __init__(self, places: dict[str, tuple[str, int, int]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = places  # key -> shard, offset, size

    def data(self, item: Item) -> bytes:
        shard, offset, size = self.places[item.key]
        if size > MOST_BYTES:
            reason = f"it has {size:,} bytes, more than the limit of {MOST_BYTES:,}"
            raise UnreadableImage(f"{item.key} of {self.where} cannot be read: {reason}", reason)
        try:
            with open(shard, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableImage(f"{item.key} of {self.where} cannot be read: {reason}", reason) from error

    def size(self, item: Item) -> int:
        return self.places[item.key][2]


def _open_shards(rest: str, labels: str | None) -> Source:
    where = f"wds:{rest}"
    _library("webdataset")
    shards = _find_shards(where, rest)
    base = Path(os.path.commonpath([shard.parent for shard in shards]))
    split_of = _shard_splits([shard.relative_to(base).as_posix() for shard in shards])
    places: dict[str, tuple[str, int, int]] = {}
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    without_image, special = 0, list[str]()
    for shard, split in zip(shards, split_of, strict=True):
        for sample, parts in _samples(shard, special):
            image = next((ext for ext in parts if f".{ext.rpartition('.')[2]}" in EXTENSIONS), None)
            if image is None:
                without_image += 1
                continue
            key = f"{shard.relative_to(base).as_posix()}/{sample}.{image}"
            if key in places:
                raise PatchloomError(f"{where}: {key} is there twice.")
            places[key] = (str(shard), *parts[image])
            found[split].append((key, _shard_label(shard, sample, parts, labels)))
    if not found:
        raise PatchloomError(
            f"{where} has no images in {len(shards)} shards; expected KEY.jpg with KEY.cls or KEY.json."
        )
    in_order: Rows = {split: found[split] for split in ("train", "val", "test", "all") if split in found}
    trained = in_order.get("train") or [row for rows in in_order.values() for row in rows]
    class_names = _numbers_first(name for _, name in trained)
    splits = label_by_name(where, class_names, in_order)
    notes = [f"{without_image} samples without an image left aside."] if without_image else []
    notes += [f"{count(len(special), 'file')} left aside, not regular files: {some(special)}"] if special else []
    return ShardSource(places, where, class_names, splits, [*notes, *class_notes(class_names, splits)])


def _find_shards(where: str, rest: str) -> list[Path]:
    path = Path(rest).expanduser()
    if path.is_dir():
        shards = sorted(found for found in path.rglob("*.tar") if not found.name.startswith("."))
    else:
        _check_ranges(where)
        expand: Callable[[str], list[str]] = import_module("webdataset.shardlists").expand_urls
        shards = [Path(name) for name in expand(str(path))]
    missing = [str(shard) for shard in shards if not shard.is_file()]
    if missing or not shards:
        lacking = f"{missing[0]} does not exist" if missing else "no .tar files there"
        raise PatchloomError(f"{where}: {lacking}. Expected a folder of .tar files, or FOLDER/shards-{{000..003}}.tar.")
    return [Path(os.path.abspath(shard)) for shard in shards]


def _check_ranges(where: str) -> None:
    """Refuse {000..999999999} before its names fill the memory."""
    count = 1
    for first, last in re.findall(r"\{(\d+)\.\.(\d+)\}", where):
        count *= max(0, int(last) - int(first)) + 1
    if count > _MOST_SHARDS:
        raise PatchloomError(f"{where} names {count} shards: at most {_MOST_SHARDS} are read.")


def _shard_splits(names: Sequence[str]) -> list[str]:
    """The split that each shard's name says, as in flowers-train-000.tar, if all of them say one."""
    said = [[part for part in re.split(r"[-_./]", name.lower()) if part in SPLIT_NAMES] for name in names]
    return [SPLIT_NAMES[parts[0]] for parts in said] if all(said) else ["all"] * len(names)


def _samples(shard: Path, special: list[str]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The samples of a shard, as WebDataset groups files: the name up to the first dot, and the places by the rest.
    Links, FIFOs and devices are added to `special`."""
    split_name: Callable[[str], tuple[str | None, str]] = import_module("webdataset.tariterators").base_plus_ext
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if not member.isfile() and not member.isdir():
                    special.append(f"{shard.name}/{member.name}")
                key, ext = split_name(member.name)
                if member.isfile() and key is not None and not Path(member.name).name.startswith(("__", ".")):
                    samples.setdefault(key, {})[ext.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PatchloomError(f"The shard {shard} cannot be read as a tar file without compression: {error}") from error
    yield from samples.items()


def _shard_label(shard: Path, sample: str, parts: dict[str, tuple[int, int]], labels: str | None) -> str:
    """What .cls says, or the field "label" (or the one asked for) of .json."""
    try:
        if "cls" in parts and labels is None:
            return _text_at(shard, parts["cls"]).strip() or _no_label(shard, sample, ".cls is empty")
        if "json" in parts:
            fields = parse_json(_text_at(shard, parts["json"]))
            if not isinstance(fields, dict) or fields.get(labels or "label") is None:
                names = ", ".join(map(str, fields)) if isinstance(fields, dict) else "none"
                _no_label(shard, sample, f".json has no label column {labels or 'label'!r}; columns: {names}")
            return str(fields[labels or "label"])
    except ValueError as error:
        if isinstance(error, PatchloomError):
            raise
        _no_label(shard, sample, str(error))
    return _no_label(shard, sample, "expected .cls, or .json with a label" if labels is None else "it has no .json")


def _no_label(shard: Path, sample: str, why: str) -> str:
    raise PatchloomError(f"The sample {sample} of {shard} has no label: {why}.")


def _text_at(shard: Path, place: tuple[int, int]) -> str:
    if place[1] > _MOST_TEXT:
        raise ValueError(f"it has {place[1]:,} bytes, more than the limit of {_MOST_TEXT:,}")
    with open(shard, "rb") as file:
        file.seek(place[0])
        return file.read(place[1]).decode("utf-8")


# --- Hugging Face's sets on disk


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


def _open_saved(rest: str, labels: str | None) -> Source:
    where = f"hf:{rest}"
    folder = Path(rest).expanduser()
    if not folder.is_dir():
        raise PatchloomError(f"{where}: {rest} is no folder; expected one written by save_to_disk.")
    library = _library("datasets")
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
    return _numbers_first(name for _, name in trained)
