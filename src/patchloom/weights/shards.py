"""Sharded training checkpoints: a folder of safetensors files, of which every process writes and reads its part.

`torch.distributed.checkpoint` writes and reads them, with any number of processes. `seal.json`, written last, holds
the part of the state without tensors and the digest of every file: a folder without it is incomplete.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.reading import file_digest, read_json
from patchloom.temporary import sync

SUFFIX = ".shards"
_SEAL = "seal.json"


def begin_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> Future[Any]:
    """Copy this process's parts of the tensors and write them in the background. All of `group` must call it."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save

    # save_distributed: each process writes its own file; otherwise one would gather all.
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # the safetensors writer does not support scalars; the seal lists their names, and reading restores the shape
    flat = {name: tensor if tensor.ndim else tensor.reshape(1) for name, tensor in tensors.items()}
    written = async_save(flat, storage_writer=writer, process_group=group)
    return written if isinstance(written, Future) else written.upload_completion


def seal_shards(folder: Path, info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the seal of a folder, after all processes have written their parts."""
    content = {
        "info": dict(info),
        "scalars": sorted(name for name, tensor in tensors.items() if tensor.ndim == 0),
        "sha256": {path.name: file_digest(path) for path in sorted(folder.glob("*.safetensors"))},
    }
    # The folder still has its temporary name: a half-written seal is never seen under a checkpoint's name.
    with open(folder / _SEAL, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    for path in (*folder.glob("*.safetensors"), folder):
        sync(path)


def check_shards(folder: Path) -> None:
    """Raise PatchloomError unless every file has the digest in the seal."""
    for name, digest in _seal(folder)["sha256"].items():
        path = folder / name
        if not path.is_file() or file_digest(path) != digest:
            raise PatchloomError(f"The checkpoint {folder.name} is damaged: {name} is missing or has changed.")


def read_shards(
    folder: Path, empty: Callable[[str, torch.Size], Tensor | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the rest of the state.

    `empty(name, shape)` returns the tensor to read into, sharded or not, or None to skip it. By default all tensors
    are read in full. Raises PatchloomError if the folder is damaged.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, TensorStorageMetadata, load

    seal, reader = _seal(folder), HuggingFaceStorageReader(str(folder))
    with _damaged_if_unreadable(folder):
        known = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, metadata in known.items():
        assert isinstance(metadata, TensorStorageMetadata)
        shape = torch.Size() if name in seal["scalars"] else metadata.size
        tensor = torch.zeros(shape, dtype=metadata.properties.dtype) if empty is None else empty(name, shape)
        if tensor is not None:
            tensors[name] = tensor if tensor.ndim else tensor.reshape(1)
    with _damaged_if_unreadable(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that only this process reads, which is intended
        # no_dist: each process reads what it needs by itself, since the number of processes may have changed.
        load(tensors, storage_reader=reader, no_dist=True)
    return {name: t.reshape(()) if name in seal["scalars"] else t for name, t in tensors.items()}, seal["info"]


@contextmanager
def _damaged_if_unreadable(folder: Path) -> Iterator[None]:
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:  # a damaged file can raise anything
        raise PatchloomError(f"The checkpoint {folder.name} is damaged: {error}.") from error


def _seal(folder: Path) -> dict[str, Any]:
    try:
        content = read_json(folder / _SEAL)
        return {"info": dict(content["info"]), "scalars": content["scalars"], "sha256": dict(content["sha256"])}
    except (ValueError, KeyError, TypeError) as error:
        raise PatchloomError(f"The checkpoint {folder.name} is damaged: {_SEAL}: {error}.") from error
