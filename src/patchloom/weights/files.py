"""Weight files: tensors and metadata, read without running code from the file, and written atomically."""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from patchloom import temporary
from patchloom.errors import PatchloomError
from patchloom.reading import parse_json, read_json
from patchloom.weights import shards

METADATA_KEY = "patchloom"
CHECKPOINT_KEY = "patchloom_checkpoint"  # metadata key of a training checkpoint: the part of its state without tensors
_DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
STORED_TYPES = tuple(_DTYPES)  # the types of tensors that `write_tensors` can store
_MAX_HEADER = 16 << 20  # bytes; a million class names take less
_UNPACKED_ALLOWANCE = 64 << 20  # bytes that any file may unpack to, whatever its own size
_ALLOCATING = b"bytearray"
# names of training checkpoints; other files in the folder are not ours
_CHECKPOINT_NAME = re.compile(rf"step-\d+\+*(\.safetensors|{re.escape(shards.SUFFIX)})")
# keys under which training scripts save the weights; DINO saves two networks, of which the teacher is evaluated
_WRAPPERS = ("model", "state_dict", "teacher", "student")


@dataclass
class Checkpoint:
    """Tensors under the names of their file, and the metadata of the file (empty if it has none)."""

    label: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # assumptions that the user should know


def read(path: Path) -> Checkpoint:
    """Read a .safetensors file, a .pth, .pt or .bin file (with weights_only=True), or the weights in a run folder.

    Raises PatchloomError if the path is not a file of weights, or the file is damaged or unsafe.
    """
    try:
        path = _weights_in(path) if path.is_dir() else path
        if path.is_dir() and path.suffix == shards.SUFFIX:
            return _read_shards(path)
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "does not exist"
            problem = "is a folder" if path.is_dir() else problem
            raise PatchloomError(f"{path} {problem}; weights are a .safetensors or .pth file.")
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        content = _read_pickle(path)
        tensors = unwrap(content, str(path))
        # a stride of 0, or names that share memory, can make a small file large in memory
        _check_unpacked(path, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        return Checkpoint(str(path), tensors, _metadata_of_pickle(content, path))
    except OSError as error:
        raise PatchloomError(f"{str(path)[:200]} cannot be read: {error.strerror}.") from error


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a .safetensors file atomically: beside `path` first, then moved into place.

    Raises:
        PatchloomError: the path is not a .safetensors file, the disk is full, or tensors share memory.
    """
    if path.suffix != ".safetensors" or "\0" in str(path):
        raise PatchloomError(f"patchloom writes .safetensors files, not {path.name!r}.")
    path = path.resolve()  # a symbolic link stays: its target is replaced
    aside = temporary.aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owners: dict[int, str] = {}
        for name, tensor in tensors.items():
            # Tied weights would be written twice and untied when read; the caller must decide.
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise RuntimeError(f"{other} and {name} share memory, which safetensors cannot store")
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_tensors(aside, plain, {METADATA_KEY: json.dumps(metadata)})
        os.replace(aside, path)
    # all but OSError come from unusual kinds of tensors
    except (OSError, RuntimeError, NotImplementedError, KeyError) as error:
        raise PatchloomError(f"{path} cannot be written: {error}.") from error
    finally:
        with suppress(OSError):
            aside.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and sync it to disk; equal weights give equal bytes.

    The safetensors library copies all tensors first while holding the GIL, which would stop training, and writes
    metadata in random order.
    """
    ordered = dict(sorted(tensors.items()))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    # The same input gives the same bytes: names are sorted, and JSON keeps their order.
    text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **header}).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered.values():
            file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def unwrap(content: Any, label: str) -> dict[str, Tensor]:
    """The state dict in what a training script saved, without the "module." prefix of data-parallel training.

    Raises PatchloomError if there is none, or a tensor is sparse, quantised or without values.
    """
    # {"model": {...}} in the official repositories, {"state_dict": {...}} in timm's and Lightning's,
    # {"student": {...}, "teacher": {...}} in DINO's.
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise PatchloomError(f"{label} does not hold a state dict, but {type(content).__name__}.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise PatchloomError(f"{label} is not a state dict: {name!r} is {type(value).__name__}, not a tensor.")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "quantised" if value.is_quantized else "without values" if value.is_meta else "sparse"
            raise PatchloomError(f"{label}: {name!r} is {kind}; weights are plain tensors.")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def _read_safetensors(path: Path) -> Checkpoint:
    _check_header(path)
    kind = _kind_of_export(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            header = file.metadata() or {}
        metadata = parse_json(header.get(METADATA_KEY) or header.get(CHECKPOINT_KEY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise PatchloomError(f"{path} is damaged or not a safetensors file: {error}.") from error
    _check_metadata(metadata, path)
    if CHECKPOINT_KEY in header:
        if header.get("sha256") != digest(header[CHECKPOINT_KEY], tensors):
            raise PatchloomError(f"{path} is damaged: its digest does not match its content.")
        tensors, metadata = _of_training(tensors, metadata)
    elif kind is not None:
        metadata["weights"] = kind
    return Checkpoint(str(path), unwrap(tensors, str(path)), metadata)


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata of a .safetensors file, without its tensors; {} for a file of others.

    Raises PatchloomError if the file is damaged.
    """
    _check_header(path)
    try:
        with safe_open(path, "pt") as file:
            found = parse_json((file.metadata() or {}).get(METADATA_KEY, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise PatchloomError(f"{path} cannot be read: {error}.") from error
    return found if isinstance(found, dict) else {}


def _check_header(path: Path) -> None:
    """Refuse a huge header: names, shapes and metadata are parsed at once and could take gigabytes."""
    with open(path, "rb") as file:
        # A safetensors file begins with the length of its JSON header, eight bytes, little-endian.
        size = int.from_bytes(file.read(8), "little")
    if _MAX_HEADER < size < path.stat().st_size:  # a header longer than the file is damaged, which safetensors reports
        raise PatchloomError(f"{path} is refused: its header has {size:,} bytes, more than {_MAX_HEADER:,}.")


def _check_unpacked(path: Path, size: int) -> None:
    """Refuse a file whose content is far larger than the file itself; torch.save does not compress."""
    packed = path.stat().st_size
    if size > 4 * packed + _UNPACKED_ALLOWANCE:
        raise PatchloomError(
            f"{path} is refused: its {packed:,} bytes unpack to {size:,}, as in a decompression bomb. If you trust it, "
            f"save its state dict as safetensors where it was made."
        )


def _metadata_of_pickle(content: Any, path: Path) -> dict[str, Any]:
    """The metadata of an exported .pth file, which is stored beside the state dict."""
    text = content.get(METADATA_KEY, "{}") if isinstance(content, Mapping) else "{}"
    try:
        metadata = parse_json(text)
    except (TypeError, ValueError) as error:
        raise PatchloomError(f"{path} is damaged: its metadata is not JSON.") from error
    _check_metadata(metadata, path)
    return metadata


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict):
        raise PatchloomError(f"{path} is damaged: its metadata is not an object, but {metadata!r}.")


def _weights_in(folder: Path) -> Path:
    """The weights in a run folder or an export; for an unfinished run, its newest checkpoint."""
    if (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    export = folder / "export" / "model.safetensors"
    newest = next(reversed(kept_checkpoints(folder / "checkpoints")), None)
    if export.is_file():
        step = exported_step(export.parent)
        # An export that does not record its step counts as newer.
        if newest is None or step is None or step >= step_of(newest)[0]:
            return export
    return newest or folder


def kept_checkpoints(folder: Path) -> list[Path]:
    """The training checkpoints of a run, oldest first."""
    found = (path for path in folder.glob("step-*") if _CHECKPOINT_NAME.fullmatch(path.name))
    return sorted((path for path in found if path.is_file() or path.is_dir()), key=step_of)  # not a FIFO


def step_of(checkpoint: Path) -> tuple[int, int]:
    """The sort key of a checkpoint such as step-00001234.safetensors: its step, then the length of its name, since
    among several folders of one step, those with more + are newer."""
    stem = checkpoint.stem
    return int(stem.strip("+").removeprefix("step-")), len(stem)


def exported_step(export: Path) -> int | None:
    """The step whose weights are in an export folder; None if its model.json, which is written last, does not say."""
    try:
        step = read_json(export / "model.json")["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _kind_of_export(path: Path) -> str | None:
    """Whether the weights of an export are "raw" or "averaged"; None for other files."""
    described = path.parent / "model.json"
    if path.name not in ("model.safetensors", "delta.safetensors") or not described.is_file():
        return None
    with suppress(PatchloomError, ValueError, KeyError, TypeError):
        kind = read_json(described)["weights"]
        return kind if kind in ("raw", "averaged") else None
    return None


def _read_shards(folder: Path) -> Checkpoint:
    shards.check_shards(folder)
    tensors, metadata = shards.read_shards(folder)
    return Checkpoint(str(folder), *_of_training(tensors, metadata))


def digest(info: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the state and the tensors of a training checkpoint.

    Names are sorted, so that the order of a state dict does not matter; dtype and shape tell equal bytes apart.
    """
    whole = hashlib.sha256(info.encode())
    for name in sorted(tensors):
        whole.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        whole.update(raw_bytes(tensors[name]))
    return whole.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor, without a copy if it is contiguous; by way of uint8, since numpy has no bfloat16.

    Returns:
        Bytes in the machine's order, which is little-endian wherever torch runs; the format demands that.
    """
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _of_training(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The averaged (EMA) weights of a training checkpoint, or the raw ones if the run does not average."""
    # version 0.1 averaged one network, and called it `ema`
    # The longest prefix first: "ema." also matches what "ema.model." matches.
    parts = [part for part in ("ema.model.", "ema.", "model.") if any(name.startswith(part) for name in tensors)]
    part = parts[0] if parts else "model."
    # Optimizer states and the raw weights of an averaging run are left out.
    weights = {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}
    kind = "averaged" if part.startswith("ema.") else "raw"
    return weights, {**metadata, "layout": "patchloom", "weights": kind}


def _read_pickle(path: Path) -> Any:
    refusal = (
        f"{path} is refused: it is damaged or holds more than tensors, and unpickling it could run code. "
        f"If you trust it, save its state dict as safetensors where it was made."
    )
    try:
        if _allocates(path):
            raise PatchloomError(refusal)
        # checkpoints of the official repository hold their command-line arguments, a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, PatchloomError):
        raise
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise PatchloomError(refusal) from error


def _allocates(path: Path) -> bool:
    """Whether unpickling could make a bytearray: torch allows it, of any size. Refuses archives that unpack to far
    more than their size."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_unpacked(path, sum(entry.file_size for entry in archive.infolist()))
            pickles = (archive.read(entry) for entry in archive.infolist() if entry.filename.endswith(".pkl"))
            return any(_ALLOCATING in content for content in pickles)
    except zipfile.BadZipFile:  # older files are not archives
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_ALLOCATING) >= 0
