"""Files of weights: tensors and what describes them, read without running anything in them, written whole or not."""

from __future__ import annotations

import argparse
import hashlib
import json
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
CHECKPOINT_KEY = "patchloom_checkpoint"  # of a training checkpoint: its state that is no tensor
_DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MOST_HEADER = 16 << 20  # bytes; a million class names take less
_FREE = 64 << 20  # bytes that any file may unpack to
_KEPT = re.compile(rf"step-\d+\+*(\.safetensors|{re.escape(shards.SUFFIX)})")  # other names are not ours
_WRAPPERS = ("model", "state_dict")  # what training scripts put weights under


@dataclass
class Checkpoint:
    """Tensors under the names of their file, and what the file says of itself (empty where it says nothing)."""

    label: str
    tensors: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what the user should know of how it was found


def read(path: Path) -> Checkpoint:
    """Read a .safetensors file, or a .pth, .pt or .bin file with weights_only=True."""
    try:
        path = _inside(path) if path.is_dir() else path
        if path.is_dir() and path.suffix == shards.SUFFIX:
            return _read_shards(path)
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            what = "is a folder" if path.is_dir() else kind
            raise PatchloomError(f"{path} {what}; weights are a .safetensors or .pth file.")
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        content = _read_pickle(path)
        tensors = unwrap(content, str(path))
        # a stride of 0, and names that share memory, can make many values of few
        _check_unpacked(path, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        return Checkpoint(str(path), tensors, _told_in_pickle(content, path))
    except OSError as error:
        raise PatchloomError(f"{str(path)[:200]} cannot be read: {error.strerror}.") from error


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a .safetensors file beside `path`, then move it into place."""
    if path.suffix != ".safetensors":
        raise PatchloomError(f"patchloom writes .safetensors files, not {path.name!r}.")
    path = path.resolve()  # a link stays a link: its target is what is replaced
    aside = temporary.aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owners: dict[int, str] = {}
        for name, tensor in tensors.items():
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise RuntimeError(f"{other} and {name} share memory, which a file cannot tell")
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_tensors(aside, plain, {METADATA_KEY: json.dumps(about)})
        os.replace(aside, path)
    except (OSError, RuntimeError, NotImplementedError, KeyError) as error:  # all but the first: odd kinds of tensors
        raise PatchloomError(f"{path} cannot be written: {error}.") from error
    finally:
        with suppress(OSError):
            aside.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, synced. The library's own writer copies everything first, holding Python up, and orders what
    a file says of itself by chance: here equal weights are equal bytes."""
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
    text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered.values():
            file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def unwrap(content: Any, label: str) -> dict[str, Tensor]:
    """The state dict inside what a training script saved, without the prefix that data-parallel training adds."""
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise PatchloomError(f"{label} holds no state dict, but {type(content).__name__}.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise PatchloomError(f"{label} is no state dict: {name!r} is {type(value).__name__}, not a tensor.")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "quantised" if value.is_quantized else "without values" if value.is_meta else "sparse"
            raise PatchloomError(f"{label}: {name!r} is {kind}; weights are plain tensors.")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def _read_safetensors(path: Path) -> Checkpoint:
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
        about = parse_json(metadata.get(METADATA_KEY) or metadata.get(CHECKPOINT_KEY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise PatchloomError(f"{path} is damaged or no safetensors file: {error}.") from error
    _check_told(about, path)
    if CHECKPOINT_KEY in metadata:
        if metadata.get("sha256") != digest(metadata[CHECKPOINT_KEY], tensors):
            raise PatchloomError(f"{path} is damaged: its digest does not fit its content.")
        tensors, about = _of_training(tensors, about)
    return Checkpoint(str(path), unwrap(tensors, str(path)), about)


def _check_header(path: Path) -> None:
    """Names, shapes and what a file says of itself are parsed whole: refuse what would take gigabytes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if _MOST_HEADER < size < path.stat().st_size:  # a longer one is damaged, which safetensors says
        raise PatchloomError(f"{path} is refused: its header has {size:,} bytes, more than {_MOST_HEADER:,}.")


def _check_unpacked(path: Path, size: int) -> None:
    """Refuse a file whose content is far larger than the file itself; torch.save does not compress."""
    packed = path.stat().st_size
    if size > 4 * packed + _FREE:
        raise PatchloomError(
            f"{path} is refused: its {packed:,} bytes unpack to {size:,}, as in a decompression bomb. If you trust it, "
            f"save its state dict as safetensors where it was made."
        )


def _told_in_pickle(content: Any, path: Path) -> dict[str, Any]:
    """What an exported .pth file says of itself, beside its state dict."""
    text = content.get(METADATA_KEY, "{}") if isinstance(content, Mapping) else "{}"
    try:
        about = parse_json(text)
    except (TypeError, ValueError) as error:
        raise PatchloomError(f"{path} is damaged: what it says of itself is no JSON.") from error
    _check_told(about, path)
    return about


def _check_told(about: Any, path: Path) -> None:
    if not isinstance(about, dict):
        raise PatchloomError(f"{path} is damaged: what it says of itself is no object, but {about!r}.")


def _inside(folder: Path) -> Path:
    """The weights in a run folder or an export; of a run that is not at its end, its newest checkpoint."""
    if (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    export = folder / "export" / "model.safetensors"
    newest = next(reversed(kept_checkpoints(folder / "checkpoints")), None)
    if export.is_file() and (newest is None or _step_of_export(export) >= step_of(newest)[0]):
        return export
    return newest or folder


def kept_checkpoints(folder: Path) -> list[Path]:
    """The training checkpoints of a run, oldest first."""
    return sorted((path for path in folder.glob("step-*") if _KEPT.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> tuple[int, int]:
    """The step of step-00001234.safetensors; of several folders of one step, those with more + are newer."""
    stem = checkpoint.stem
    return int(stem.strip("+").removeprefix("step-")), len(stem)


def _step_of_export(path: Path) -> float:
    """The step that an export was made at; one that does not say is taken as the end."""
    try:
        return float(read_json(path.parent / "model.json")["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _read_shards(folder: Path) -> Checkpoint:
    shards.check_shards(folder)
    tensors, about = shards.read_shards(folder)
    return Checkpoint(str(folder), *_of_training(tensors, about))


def digest(info: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over what a training checkpoint says and holds."""
    whole = hashlib.sha256(info.encode())
    for name in sorted(tensors):
        whole.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        whole.update(raw_bytes(tensors[name]))
    return whole.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _of_training(tensors: dict[str, Tensor], about: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The averaged weights of a training checkpoint, or the raw ones where the run does not average."""
    # version 0.1 averaged one network, and called it `ema`
    part = next(part for part in ("ema.model.", "ema.", "model.") if any(n.startswith(part) for n in (*tensors, part)))
    weights = {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}
    return weights, {**about, "layout": "patchloom"}


def _read_pickle(path: Path) -> Any:
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:  # older files are not archives
        _check_unpacked(path, sum(entry.file_size for entry in archive.infolist()))
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; the official script's arguments are a Namespace
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever unpickling noise can raise
        raise PatchloomError(
            f"{path} is refused: it is damaged, or holds more than tensors, and unpickling it could run code. "
            f"If you trust it, save its state dict as safetensors where it was made."
        ) from error
