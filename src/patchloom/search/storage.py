"""An index on disk: a folder with vectors, items and index.json, which says which files belong to it.

A change writes new files beside the old ones and replaces index.json last, in one step: whatever interrupts it, the
folder is the index before the change or the one after it. index.json has the size and digest of every file and of
itself, so that damage is noticed when an index is opened.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from patchloom import temporary
from patchloom.errors import PatchloomError
from patchloom.reading import file_digest, read_json

FORMAT = "patchloom index"
VERSION = 1
HEADER = "index.json"


@dataclass(frozen=True)
class Header:
    """The content of index.json."""

    kind: str  # exact, hnsw or ivf
    count: int
    dim: int
    model: dict[str, Any]  # weights, digest, name, hints, label_column
    preprocessing: dict[str, Any]
    data: dict[str, Any]  # where, split, root: what the first images came from
    k: dict[str, int]  # for each label column the number of neighbours that leave-one-out chose
    approximate: dict[str, Any] = field(default_factory=dict)  # settings of hnsw and ivf, and their recall
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # role -> name, bytes, sha256
    generation: int = 1
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Column:
    """The labels of one column: places in `names`, (N,) int32; -1 for an image without one."""

    names: tuple[str, ...]
    labels: np.ndarray

    def name(self, place: int) -> str | None:
        """The label of an item."""
        label = int(self.labels[place])
        return None if label < 0 else self.names[label]

    @property
    def complete(self) -> bool:
        return bool((self.labels >= 0).all())


@dataclass(frozen=True)
class Contents:
    """The images of an index: unit vectors (N, D) float32, and for each its key, digest and labels."""

    vectors: np.ndarray
    keys: list[str]
    digests: list[str]
    columns: dict[str, Column]

    def labels(self, place: int) -> dict[str, str | None]:
        return {name: column.name(place) for name, column in self.columns.items()}


def is_index(folder: Path) -> bool:
    """Whether a folder has the header of an index."""
    return (folder / HEADER).is_file()


def read_header(folder: Path) -> Header:
    """index.json; anything that is not a whole index of a known version is a `PatchloomError`."""
    if not is_index(folder):
        hint = "" if folder.exists() else " It does not exist."
        building = folder.with_name(f".{folder.name}.building")
        if building.is_dir():
            hint = " Its build was interrupted: `patchloom search build ... --resume` continues it."
        raise PatchloomError(f"{folder} is not an index of `patchloom search build`.{hint}")
    found = read_json(folder / HEADER)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PatchloomError(f"{folder / HEADER} does not describe an index.")
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise PatchloomError(
            f"{folder} has version {version} of the index format, which a newer patchloom wrote. This one reads "
            f"version {VERSION}: update patchloom."
        )
    digest = found.pop("digest", None)
    if digest != _digest_of(found):
        raise _damaged(folder, f"{HEADER} was changed")
    try:
        del found["format"]
        return Header(**found)
    except TypeError as error:
        raise _damaged(folder, str(error)) from error


def read_index(folder: Path) -> tuple[Header, Contents]:
    """The header and the contents of an index. Its vectors are memory-mapped; every file is compared with its digest.

    Raises:
        PatchloomError: The folder is not an index, it is damaged, or a newer patchloom wrote it.
    """
    for attempt in range(5):
        header = read_header(folder)
        try:
            return header, _contents(folder, header)
        except FileNotFoundError as error:
            # a change may have replaced the files since index.json was read
            if attempt == 4 or read_header(folder).generation == header.generation:
                raise _damaged(folder, f"{error.filename} is missing") from error
    raise AssertionError("unreachable")


def _contents(folder: Path, header: Header) -> Contents:
    for entry in header.files.values():
        check_file(folder, entry)
    # copy-on-write, since torch warns of arrays that it must not write to; nothing does
    vectors = np.load(file_of(folder, header, "vectors"), mmap_mode="c")
    items = read_json(folder / header.files["items"]["name"])
    try:
        columns = {
            name: Column(tuple(entry["names"]), np.asarray(entry["labels"], np.int32))
            for name, entry in items["columns"].items()
        }
        contents = Contents(vectors, items["keys"], items["digests"], columns)
        lengths = {len(contents.keys), len(contents.digests), *(len(column.labels) for column in columns.values())}
        if vectors.shape != (header.count, header.dim) or lengths != {header.count}:
            raise ValueError(f"{header.count} images, {sorted(lengths)} rows and vectors {vectors.shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, str(error)) from error
    return contents


def next_generation(header: Header) -> int:
    """The number of the next generation: above that of every file, so that none of them is written over.

    A build that leaves out unreadable images names its vectors vectors-2.npy although it is generation 1.
    """
    numbers = (Path(entry["name"]).stem.rpartition("-")[2] for entry in header.files.values())
    return 1 + max(header.generation, *(int(number) for number in numbers if number.isdigit()))


def file_of(folder: Path, header: Header, role: str) -> Path:
    return folder / header.files[role]["name"]


def check_file(folder: Path, entry: Mapping[str, Any]) -> None:
    """Compare a file with the size and the digest that index.json has of it."""
    path = folder / entry["name"]
    size = os.stat(path).st_size
    if size != entry["bytes"]:
        raise _damaged(folder, f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}")
    if file_digest(path) != entry["sha256"]:
        raise _damaged(folder, f"the content of {path.name} was changed")


def _damaged(folder: Path, why: str) -> PatchloomError:
    return PatchloomError(f"The index {folder} is damaged: {why}. Build it again from its images.")


def write_vectors(path: Path, parts: Iterator[np.ndarray], count: int, dim: int) -> None:
    """(count, dim) float32, part by part, synced to disk."""
    target: Any = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, dim))
    start = 0
    for part in parts:
        target[start : start + len(part)] = part
        start += len(part)
    assert start == count
    target.flush()
    temporary.sync(path)


def write_items(path: Path, contents: Contents) -> None:
    columns = {
        name: {"names": list(column.names), "labels": column.labels.tolist()}
        for name, column in contents.columns.items()
    }
    text = json.dumps({"keys": contents.keys, "digests": contents.digests, "columns": columns})
    temporary.write_text(path, text)


def write_header(folder: Path, header: Header, roles: Mapping[str, str]) -> Header:
    """Replace index.json, which makes the files of `roles` (role -> name) the index; sweep those of earlier ones."""
    files = {
        role: {"name": name, "bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
        for role, name in roles.items()
    }
    header = dataclasses.replace(header, files=files)
    metadata = header.to_json()
    temporary.write_json(folder / HEADER, {**metadata, "digest": _digest_of(metadata)})
    temporary.sync(folder)
    sweep(folder, header)
    return header


def sweep(folder: Path, header: Header) -> None:
    """Remove the files of earlier generations, and what an interrupted change left."""
    kept = {HEADER, *(entry["name"] for entry in header.files.values())}
    for path in folder.iterdir():
        if path.name not in kept and path.name.startswith(("vectors-", "items-", "neighbours-", f".{HEADER}.")):
            with suppress(OSError):
                path.unlink()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, so that two processes do not change the same index; it ends with the process."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise PatchloomError(f"{path.parent} cannot be written: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PatchloomError(f"Another process is changing {what}. Wait until it has finished.") from error
        yield
    finally:
        os.close(handle)


def _digest_of(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
