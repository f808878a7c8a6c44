"""Add images to an index and remove some: new files first, then index.json in one step."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom.console import Console
from patchloom.data.collating import collate
from patchloom.data.decoding import decode_picture, read_encoded
from patchloom.data.images import as_picture, crop
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.inference.embeddings import BATCH, content_digest, embed_pixels
from patchloom.inference.neighbours import normalise
from patchloom.inference.predict import expand_all
from patchloom.search.building import chosen_ks, read_approximate, write_rest
from patchloom.search.storage import Column, Contents, Header, locked, next_generation, write_vectors
from patchloom.text import some

if TYPE_CHECKING:
    from patchloom.search.index import Index

_BLOCK = 65536  # rows that are copied at a time


def locked_folder(path: Path) -> AbstractContextManager[None]:
    """One change at a time."""
    return locked(path / "write.lock", str(path))


@dataclass
class _New:
    """Images to add that the index does not have as they are."""

    keys: list[str]
    digests: list[str]
    vectors: np.ndarray


def add(index: Index, images: Any, labels: Mapping[str, str], console: Console | None) -> dict[str, int]:
    """See `Index.add`."""
    console = console or Console(quiet=True)
    labels = _checked_labels(index, labels)
    new, same = _embed_new(index, images, console)
    old = index.contents
    place = {key: i for i, key in enumerate(old.keys)}
    replaced = [place[key] for key in new.keys if key in place]
    if not new.keys and all(
        old.columns[name].name(place[key]) == value for name, value in labels.items() for key in same
    ):
        return {"added": 0, "replaced": 0, "unchanged": len(same)}
    # A replaced image loses its row and comes again at the end, with the vector of its new content.
    kept = np.setdiff1d(np.arange(len(old.keys)), replaced)
    keys = [*(old.keys[i] for i in kept), *new.keys]
    digests = [*(old.digests[i] for i in kept), *new.digests]
    changed = {*new.keys, *same}
    columns = _with_labels(old.columns, [*kept, *(place.get(key, -1) for key in new.keys)], keys, changed, labels)
    _write(index, kept, new.vectors, keys, digests, columns)
    return {"added": len(new.keys) - len(replaced), "replaced": len(replaced), "unchanged": len(same)}


def remove(index: Index, keys: Sequence[str]) -> int:
    """See `Index.remove`."""
    old = index.contents
    place = {key: i for i, key in enumerate(old.keys)}
    # The path of a file is accepted in place of its key.
    named = {key: key if key in place else _key_of(index, key) for key in keys}
    unknown = [key for key, found in named.items() if found not in place]
    if unknown:
        raise PatchloomError(
            f"{index.path} has no image {some([repr(key) for key in unknown])}"
            f"{did_you_mean(unknown[0], old.keys[:100_000])} Nothing was removed."
        )
    gone = {place[found] for found in named.values()}
    if len(gone) == len(old.keys):
        raise PatchloomError(f"These are all images of {index.path}: delete the folder instead. Nothing was removed.")
    kept = np.asarray([i for i in range(len(old.keys)) if i not in gone], np.int64)
    columns = {name: Column(column.names, column.labels[kept]) for name, column in old.columns.items()}
    nothing = np.zeros((0, index.header.dim), np.float32)
    _write(index, kept, nothing, [old.keys[i] for i in kept], [old.digests[i] for i in kept], columns)
    return len(gone)


def _checked_labels(index: Index, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels without spaces around them, as manifests are read; unknown columns and empty labels are refused."""
    if other := [text for pair in labels.items() for text in pair if not isinstance(text, str)]:
        raise PatchloomError(f"labels has text for columns and classes, not {type(other[0]).__name__}.")
    found = {name.strip(): value.strip() for name, value in labels.items()}
    for name, value in found.items():
        # An index without columns takes any: the first label makes one.
        if index.columns and name not in index.columns:
            raise PatchloomError(
                f"{index.path} has no label column {name!r}.{did_you_mean(name, index.columns)} "
                f"Label columns: {', '.join(index.columns)}."
            )
        if not name or not value:
            raise PatchloomError(f"A label is COLUMN=NAME, not {name}={value}.")
    return found


def _embed_new(index: Index, images: Any, console: Console) -> tuple[_New, list[str]]:
    """The images that must be embedded, and the keys of those that the index has already."""
    known = dict(zip(index.contents.keys, index.contents.digests, strict=True))
    same: list[str] = []
    new: dict[str, str] = {}  # key -> digest
    vectors: list[np.ndarray] = []
    waiting = iter(expand_all(images))
    while part := list(islice(waiting, BATCH)):
        pixels = []
        for image in part:
            key, digest, picture = _read(index, image)
            if known.get(key) == digest:
                same.append(key)
            # An image that is given twice is embedded once.
            elif key not in new:
                pixels.append(crop(picture(), index.network.preprocessing))
                new[key] = digest
        if pixels:
            vectors.append(normalise(embed_pixels(index.network, collate(pixels), index.network.preprocessing)).numpy())
        console.progress(f"embedding: {len(new)} images")
    if not new and not same:
        raise PatchloomError("No image was given to add.")
    empty = np.zeros((0, index.header.dim), np.float32)
    rows = np.concatenate(vectors) if vectors else empty
    return _New(list(new), list(new.values()), rows), list(dict.fromkeys(same))


def _read(index: Index, image: Any) -> tuple[str, str, Any]:
    """Key, digest, and a function that decodes the image."""
    if isinstance(image, str | PathLike):
        data = read_encoded(image)
        return _key_of(index, image), content_digest(data), lambda: decode_picture(data, str(image))
    picture = as_picture(image)
    if not hasattr(picture, "tobytes"):
        raise PatchloomError("An image to add is a file or a PIL image: a tensor has no name and no pixels to show.")
    digest = content_digest(None, picture)  # type: ignore[arg-type]
    return f"image-{digest[:12]}", digest, lambda: picture


def _key_of(index: Index, image: str | PathLike[str]) -> str:
    """The key of a file: relative to the folder of the first images where that is possible, else absolute."""
    path = Path(os.path.abspath(os.path.expanduser(image)))
    root = index.header.data.get("root")
    # As it is written, then without links: the recorded root has none.
    for place in (path, path.resolve()):
        if root is not None and place.is_relative_to(root):
            return place.relative_to(root).as_posix()
    return path.as_posix()


def _with_labels(
    columns: Mapping[str, Column],
    before: Sequence[int],
    keys: Sequence[str],
    changed: set[str],
    labels: Mapping[str, str],
) -> dict[str, Column]:
    """The columns of the images `keys`, whose places were `before` (-1: new); `labels` are those of changed images."""
    found = {}
    touched = np.asarray([key in changed for key in keys], bool)
    for name in dict.fromkeys([*columns, *labels]):
        old = columns[name].labels if name in columns else np.zeros(0, np.int32)
        numbers = np.asarray([old[i] if 0 <= i < len(old) else -1 for i in before], np.int32)
        names = columns[name].names if name in columns else ()
        if name in labels:
            if labels[name] not in names:
                names = (*names, labels[name])
            numbers[touched] = names.index(labels[name])
        found[name] = Column(names, numbers)
    return found


def _write(
    index: Index,
    kept: np.ndarray,
    new: np.ndarray,
    keys: list[str],
    digests: list[str],
    columns: dict[str, Column],
) -> None:
    """Write the next generation: the images at `kept`, then new ones with the vectors `new`."""
    header: Header = dataclasses.replace(index.header, count=len(keys), generation=next_generation(index.header))
    # Under a new name: a service that has the old file open goes on reading it.
    name = f"vectors-{header.generation}.npy"
    write_vectors(index.path / name, _rows(index.contents.vectors, kept, new), len(keys), header.dim)
    vectors = np.load(index.path / name, mmap_mode="c")
    contents = Contents(vectors, keys, digests, {name: _used(column) for name, column in columns.items()})
    header = dataclasses.replace(header, k=chosen_ks(contents))
    graph = None
    # Approximate indexes of faiss can grow but not forget: without some images they are built from all vectors.
    if len(kept) == len(index.contents.keys):
        # A copy of its own: if writing fails, the index goes on with the one that it has.
        graph = read_approximate(index.path, index.header)
        if graph is not None and len(new):
            graph.add(new, vectors)
    write_rest(index.path, header, contents, name, graph)


def _used(column: Column) -> Column:
    """Without the classes that no image has any more: what was removed is not predicted or listed."""
    used = np.unique(column.labels[column.labels >= 0])
    if len(used) == len(column.names):
        return column
    # One place more than classes: -1, the label of images without one, is the last place and stays -1.
    place = np.full(len(column.names) + 1, -1, np.int32)
    place[used] = np.arange(len(used))
    return Column(tuple(column.names[i] for i in used), place[column.labels])


def _rows(old: np.ndarray, kept: np.ndarray, new: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(kept), _BLOCK):
        yield old[kept[start : start + _BLOCK]]
    if len(new):
        yield new
