"""WebDataset tar shards: wds:FOLDER/shards-{000..003}.tar, or a folder of .tar files."""

from __future__ import annotations

import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from patchloom.data.decoding import EXTENSIONS, MOST_BYTES, UnreadableImage
from patchloom.data.listing import (
    SPLIT_NAMES,
    Labels,
    Row,
    Rows,
    class_columns,
    class_notes,
    import_library,
    label_by_name,
    numbers_first,
    split_labels,
)
from patchloom.data.sources import DEFAULT_COLUMN, Item, Source
from patchloom.errors import PatchloomError
from patchloom.reading import parse_json
from patchloom.text import count, some

_MOST_SHARDS = 100_000
_MOST_TEXT = 1 << 20  # bytes of a label


class ShardSource(Source):
    """Images inside tar files, found by an index of their places, so that any one of them can be read at any time."""

    def __init__(self, places: dict[str, tuple[str, int, int]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = places  # key -> shard, offset, size

    def data(self, item: Item) -> bytes:
        shard, offset, size = self.places[item.key]
        # The size comes from the tar header, which anybody can write.
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
        """From the index: no file is opened."""
        return self.places[item.key][2]


def open_shards(rest: str, labels: Labels = None, targets: str = "class") -> Source:
    """The images of tar files, KEY.jpg with the label in KEY.cls or the fields of KEY.json.

    Raises:
        PatchloomError: no shards or no images, a sample without a label, a key twice, or webdataset is missing.
    """
    where = f"wds:{rest}"
    import_library("webdataset")
    shards = _find_shards(where, rest)
    # Keys are relative to what all shards share, so that they stay when the data moves.
    base = Path(os.path.commonpath([shard.parent for shard in shards]))
    split_of = _shard_splits([shard.relative_to(base).as_posix() for shard in shards])
    places: dict[str, tuple[str, int, int]] = {}
    found: dict[str, list[Row]] = defaultdict(list)
    chosen = (None,) if labels is None else split_labels(labels)  # None: .cls, or the field "label" of .json
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
            # Place and size are kept, not the bytes: any image can be read by seeking, so shuffling is exact.
            places[key] = (str(shard), *parts[image])
            try:
                names = tuple(_shard_label(shard, sample, parts, column) for column in chosen)
            except _NoLabel as error:
                if targets != "none" or labels is not None:
                    raise PatchloomError(*error.args) from error
                names = ()
            found[split].append((key, names))
    if not found:
        raise PatchloomError(
            f"{where} has no images in {len(shards)} shards; expected KEY.jpg with KEY.cls or KEY.json."
        )
    in_order: Rows = {split: found[split] for split in ("train", "val", "test", "all") if split in found}
    unlabelled = sum(not names for rows in in_order.values() for _, names in rows)
    if unlabelled:
        in_order = {split: [(key, ()) for key, _ in rows] for split, rows in in_order.items()}
    named = [] if unlabelled else [name or DEFAULT_COLUMN for name in chosen]
    columns = class_columns(named, in_order, numbers_first, targets)
    splits = label_by_name(where, columns, in_order)
    class_names = next(iter(columns.values()), [])
    notes = [f"{count(unlabelled, 'sample')} without a label: no labels are used."] if unlabelled else []
    notes += [f"{without_image} samples without an image skipped."] if without_image else []
    notes += [f"{count(len(special), 'file')} skipped, not regular files: {some(special)}"] if special else []
    return ShardSource(places, where, class_names, splits, [*notes, *class_notes(class_names, splits)], columns)


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
    """The split in each shard's name, as in flowers-train-000.tar, if all of them have one."""
    parts_of = [[part for part in re.split(r"[-_./]", name.lower()) if part in SPLIT_NAMES] for name in names]
    return [SPLIT_NAMES[parts[0]] for parts in parts_of] if all(parts_of) else ["all"] * len(names)


def _samples(shard: Path, special: list[str]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The samples of a shard, as WebDataset groups files: the name up to the first dot, and the places by the rest.
    Links, FIFOs and devices are added to `special`."""
    split_name: Callable[[str], tuple[str | None, str]] = import_module("webdataset.tariterators").base_plus_ext
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        # "r:" takes no compressed tars: their members cannot be read without unpacking all before them.
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


class _NoLabel(ValueError):
    """A sample without the label that was asked for."""


def _shard_label(shard: Path, sample: str, parts: dict[str, tuple[int, int]], column: str | None) -> str:
    """The text of .cls, or the field "label" (or the column asked for) of .json."""
    begin = f"The sample {sample} of {shard} has no label:"
    try:
        if "cls" in parts and column is None:
            if not (text := _text_at(shard, parts["cls"]).strip()):
                raise _NoLabel(f"{begin} .cls is empty.")
            return text
        if "json" in parts:
            fields = parse_json(_text_at(shard, parts["json"]))
            if not isinstance(fields, dict) or fields.get(column or "label") is None:
                names = ", ".join(map(str, fields)) if isinstance(fields, dict) else "none"
                raise _NoLabel(f"{begin} .json has no label column {column or 'label'!r}; columns: {names}.")
            return str(fields[column or "label"])
    except _NoLabel:
        raise
    except ValueError as error:  # neither text nor JSON: an error for data without labels too
        raise PatchloomError(f"{begin} {error}.") from error
    raise _NoLabel(f"{begin} " + ("expected .cls, or .json with a label." if column is None else "it has no .json."))


def _text_at(shard: Path, place: tuple[int, int]) -> str:
    if place[1] > _MOST_TEXT:
        raise ValueError(f"it has {place[1]:,} bytes, more than the limit of {_MOST_TEXT:,}")
    with open(shard, "rb") as file:
        file.seek(place[0])
        return file.read(place[1]).decode("utf-8")
