"""Build an index: embed every image of a data set, in a folder beside the index that a later build can resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from patchloom import temporary
from patchloom.console import Console
from patchloom.data.scan import report_skipped
from patchloom.data.sources import FileSource, Item, Source, bytes_of
from patchloom.data.splits import join_splits, split_names
from patchloom.devices import Device
from patchloom.errors import PatchloomError, check_place, errors_in_writing
from patchloom.inference.embeddings import BATCH, DIGEST, embed_items
from patchloom.inference.models import Model
from patchloom.inference.neighbours import choose_k, normalise
from patchloom.inference.predict import check_batch
from patchloom.models.fused import fuse
from patchloom.reading import read_json
from patchloom.search.approximate import Approximate, check_kind
from patchloom.search.columns import Labels, column_list, conflicts, labels_of, open_labelled
from patchloom.search.storage import (
    Column,
    Contents,
    Header,
    file_of,
    is_index,
    locked,
    read_header,
    write_header,
    write_items,
    write_vectors,
)
from patchloom.search.weights import describe_weights, open_weights
from patchloom.text import count

PLAN, PROGRESS, DIGESTS = "plan.json", "progress.json", "digests.npy"  # of a build, not of an index
_FLUSH = 16  # batches between two records of the progress


def build(
    weights: Model,
    data: str | PathLike[str] | Any,
    out: str | PathLike[str],
    *,
    labels: Labels = None,
    split: str | None = None,
    kind: str = "exact",
    resume: bool = False,
    hints: Mapping[str, Any] | None = None,
    batch: int = BATCH,
    workers: int = 0,
    device: Device = "auto",
    console: Console | None = None,
) -> Header:
    """Embed all images of `data`, or of one split, and write the index; see `Index.build`."""
    console = console or Console(quiet=True)
    check_kind(kind)
    check_batch(batch)
    check_place("out", out)
    out = Path(out)
    _check_place(out, resume)
    network = open_weights(weights, hints, device)
    source = open_labelled(data, labels)
    for message in (*source.notes, *conflicts(source)):
        console.say(f"Note: {message}")
    items = join_splits(source, split_names(source, split)) if split not in (None, "all") else _all(source)
    if not items:
        raise PatchloomError(f"{source.where} has no image to build an index of.")
    plan = {
        "model": describe_weights(weights, network, hints),
        "preprocessing": network.preprocessing.to_json(),
        "data": {"where": _where(source, data), "labels": column_list(labels), "split": split, "root": _root(source)},
        "kind": kind,
        "batch": batch,
        "items": _fingerprint(source, items),
    }
    if resume and is_index(out):
        return _whole_already(out, plan, console)
    with errors_in_writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed at the end: a folder with the final name is always a complete index.
    with locked(out.with_name(f".{out.name}.lock"), str(out)):
        _check_place(out, resume=False)  # another process may have built it since
        work = out.with_name(f".{out.name}.building")
        build = _Build(work, plan, source, items, console)
        build.begin(resume)
        build.embed(fuse(network), batch, workers)
        header = build.finish()
        os.replace(work, out)
        temporary.sync(out.parent)
        for name in (PLAN, PROGRESS, DIGESTS):
            (out / name).unlink(missing_ok=True)
    out.with_name(f".{out.name}.lock").unlink(missing_ok=True)
    return header


def _check_place(out: Path, resume: bool) -> None:
    """Refuse to replace what is there; a build that is resumed may find its index complete."""
    if out.exists() and not (resume and is_index(out)):
        raise PatchloomError(f"{out} exists already. `patchloom search add` adds images to an index; or remove it.")


def _all(source: Source) -> list[Item]:
    # An image that is in two splits is in the index once.
    return list(dict.fromkeys(source.items()))


def _where(source: Source, data: Any) -> str | None:
    """What `open_source` takes to find the images again; None for a data set in memory."""
    if not isinstance(data, str | PathLike):
        return None
    # Absolute, so that the index works from any folder.
    return str(Path(data).resolve()) if isinstance(source, FileSource) and ":" not in str(data) else str(data)


def _root(source: Source) -> str | None:
    """The folder that keys are relative to, of images in files."""
    return str(source.root.resolve()) if isinstance(source, FileSource) else None


def _fingerprint(source: Source, items: Sequence[Item]) -> str:
    """What a resumed build must find unchanged: keys, labels and sizes."""
    digest = hashlib.sha256()
    for item in items:
        row = "\0".join((item.key, source.describe_target(item), str(source.size(item))))
        digest.update(bytes_of(row) + b"\n")
    return digest.hexdigest()


def _whole_already(out: Path, plan: Mapping[str, Any], console: Console) -> Header:
    """--resume of a build that is complete."""
    header = read_header(out)
    same = {
        "weights": header.model["digest"] == plan["model"]["digest"],
        "data": header.data == plan["data"],
        "kind": header.kind == plan["kind"],
    }
    if changed := [name for name, equal in same.items() if not equal]:
        raise PatchloomError(f"{out} is a complete index that differs in {', '.join(changed)}: nothing can be resumed.")
    console.say(f"{out} is complete: {count(header.count, 'image')}.")
    return header


class _Build:
    """A build in its folder: plan.json, vectors and digests of the images so far, and progress.json, which counts them;
    at the end, the files of the index."""

    def __init__(self, folder: Path, plan: dict[str, Any], source: Source, items: list[Item], console: Console) -> None:
        self.folder, self.source, self.items, self.console = folder, source, items, console
        self.plan = json.loads(json.dumps(plan))  # as it is read again: tuples are lists
        self.done = 0  # images
        self.unreadable: dict[str, str] = {}
        self.vectors, self.digests = folder / "vectors-1.npy", folder / DIGESTS

    def begin(self, resume: bool) -> None:
        """Prepare the folder: continue what is there, or start over."""
        plan = self.folder / PLAN
        if resume and plan.is_file():
            # Vectors of other weights or images would be mixed with the new ones, and nobody could tell.
            if (before := read_json(plan)) != self.plan:
                changed = ", ".join(name for name in self.plan if before.get(name) != self.plan[name])
                raise PatchloomError(
                    f"The interrupted build differs in {changed}: resume it with the same weights, data and options, "
                    "or start over without --resume."
                )
            progress = self.folder / PROGRESS
            if progress.is_file() and self.vectors.is_file() and self.digests.is_file():
                found = read_json(progress)
                self.done, self.unreadable = found["images"], found["unreadable"]
            self.console.say(f"Resuming after {count(self.done, 'image')} of {len(self.items)}.")
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        temporary.write_text(plan, json.dumps(self.plan))

    def embed(self, network: Any, batch: int, workers: int) -> None:
        """Embed what is not embedded yet, and record the progress every few batches."""
        total = len(self.items)
        rows: Any = np.load(self.vectors, mmap_mode="r+") if self.done else None
        digests = _mapped(self.digests, f"S{DIGEST}", (total,), "r+" if self.done else "w+")
        for number, found in enumerate(embed_items(network, self.source, self.items, batch, workers, self.done), 1):
            part = slice(self.done, self.done + len(found.digests))
            # The dimension is known from the first batch with a readable image.
            if rows is None and found.vectors.shape[1]:
                rows = _mapped(self.vectors, "float32", (total, found.vectors.shape[1]), "w+")
            if rows is not None and found.vectors.shape[1]:
                rows[part] = normalise(found.vectors).numpy()
            digests[part] = found.digests
            self.unreadable |= {self.items[part.start + place].key: why for place, why in found.unreadable.items()}
            self.done = part.stop
            self.console.progress(f"embedding: {self.done} of {total} images")
            if rows is not None and (number % _FLUSH == 0 or self.done == total):
                # Vectors first, then the progress that counts them: a kill in between repeats some batches.
                rows.flush()
                digests.flush()
                progress = {"images": self.done, "unreadable": self.unreadable}
                temporary.write_text(self.folder / PROGRESS, json.dumps(progress))
        if len(self.unreadable) == total:
            raise PatchloomError(
                f"No image of {self.source.where} can be read: {next(iter(self.unreadable.values()))}."
            )
        if self.unreadable:
            report_skipped(self.unreadable, self.console, strict=False)

    def finish(self) -> Header:
        """Leave unreadable images out, choose k, build the approximate index, and write the index."""
        vectors = np.load(self.vectors, mmap_mode="c")
        good = np.asarray([item.key not in self.unreadable for item in self.items])
        kept = [item for item, readable in zip(self.items, good, strict=True) if readable]
        digests = np.load(self.digests)[good].astype(str).tolist()
        if not good.all():
            # In blocks: the vectors of a million images need not fit into memory.
            self.vectors = self.folder / "vectors-2.npy"
            blocks = np.array_split(np.flatnonzero(good), max(1, len(kept) // 65536))
            write_vectors(self.vectors, (vectors[block] for block in blocks), len(kept), vectors.shape[1])
            vectors = np.load(self.vectors, mmap_mode="c")
        contents = Contents(vectors, [item.key for item in kept], digests, labels_of(self.source, kept))
        header = Header(
            self.plan["kind"], len(kept), vectors.shape[1], self.plan["model"], self.plan["preprocessing"],
            self.plan["data"], chosen_ks(contents),
        )  # fmt: skip
        return write_rest(self.folder, header, contents, self.vectors.name)


def _mapped(path: Path, kind: str, shape: tuple[int, ...], mode: Literal["r+", "w+"]) -> Any:
    """An array in a file, existing ("r+") or new ("w+")."""
    return np.lib.format.open_memmap(path, mode=mode, dtype=np.dtype(kind), shape=shape)


def chosen_ks(contents: Contents) -> dict[str, int]:
    """For each column the k of leave-one-out on the images that have a label in it."""
    return {name: _chosen_k(contents.vectors, column) for name, column in contents.columns.items()}


def _chosen_k(vectors: np.ndarray, column: Column) -> int:
    known = column.labels >= 0
    if known.all():
        return choose_k(vectors, column.labels)[0] if len(vectors) else 1
    return choose_k(vectors[known], column.labels[known])[0] if known.any() else 1


def write_rest(
    folder: Path, header: Header, contents: Contents, vectors: str, approximate: Approximate | None = None
) -> Header:
    """Write the items, the approximate index if the kind has one, and last index.json."""
    roles = {"vectors": vectors, "items": f"items-{header.generation}.json"}
    write_items(folder / roles["items"], contents)
    if header.kind != "exact":
        approximate = approximate or Approximate.build(header.kind, contents.vectors)
        roles["neighbours"] = f"neighbours-{header.generation}.faiss"
        approximate.write(folder / roles["neighbours"])
        header = dataclasses.replace(header, approximate=approximate.settings)
    return write_header(folder, header, roles)


def read_approximate(folder: Path, header: Header) -> Approximate | None:
    if header.kind == "exact":
        return None
    return Approximate.read(file_of(folder, header, "neighbours"), header.approximate)
