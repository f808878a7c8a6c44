"""What can be written: the formats, what each needs and can do, and what all their files say of themselves."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from torch import Tensor

from patchloom import __version__
from patchloom.data.images import to_input
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.install import install_hint
from patchloom.models.network import Network

Runner = Callable[[np.ndarray], np.ndarray]  # what `input` takes -> logits (B, classes)


@dataclass(frozen=True)
class Request:
    """A network on the CPU, in float32 and eval mode, and how it is wanted."""

    network: Network
    int8: bool
    with_preprocessing: bool
    calibration: Tensor | None = None  # (N, height, width, C) uint8: int8 takes the ranges of activations from these

    @property
    def any_size(self) -> bool:
        """Whether height and width are free. A torch program of one row or column of patches would hold for these."""
        return self.network._takes_any_size() and min(self.network.config.grid) > 1

    @property
    def quantisation(self) -> str | None:
        """How activations get their ranges: as they come, or from images."""
        return None if not self.int8 else "dynamic" if self.calibration is None else "percentile"

    def as_input(self, pixels: Tensor) -> np.ndarray:
        """Pixels (B, height, width, C), resized and cropped, as the file takes them."""
        if self.with_preprocessing:
            return pixels.numpy()
        return to_input(pixels, self.network.preprocessing).contiguous().numpy()


class Artefact(Protocol):
    """A network made ready for one format; written once for the check, and again with what the check found."""

    def write(self, path: Path, found: dict[str, Any]) -> None: ...

    def open(self, path: Path) -> Runner:
        """What runs the written file, as its users will."""
        ...


@dataclass(frozen=True)
class Format:
    suffixes: tuple[str, ...]
    module: str  # has make(request, format name) -> Artefact
    packages: tuple[str, ...] = ()
    graph: bool = True  # a program, not only weights: preprocessing can be inside
    int8: bool = False
    calibrates: bool = False  # has a second form of int8, whose activations have ranges that images gave


FORMATS = {
    "onnx": Format((".onnx",), "onnx", ("onnx", "onnxscript", "onnxruntime"), int8=True, calibrates=True),
    "openvino": Format((".xml",), "openvino", ("onnx", "onnxscript", "openvino"), int8=True),
    "torch": Format((".pt2",), "graph"),
    "safetensors": Format((".safetensors",), "weights", graph=False),
    "timm": Format((".safetensors",), "weights", graph=False),
    "official": Format((".safetensors", ".pth"), "weights", graph=False),
}


def find_format(to: str, int8: bool, with_preprocessing: bool) -> Format:
    """The format of this name, if it can do what is asked and its packages are installed."""
    if to not in FORMATS:
        raise PatchloomError(f"There is no format {to!r}; there are {', '.join(FORMATS)}.{did_you_mean(to, FORMATS)}")
    form = FORMATS[to]
    if int8 and not form.int8:
        able = " and ".join(name for name, other in FORMATS.items() if other.int8)
        raise PatchloomError(f"{to} has no int8 form here; {able} have one.")
    if with_preprocessing and not form.graph:
        able = ", ".join(name for name, other in FORMATS.items() if other.graph)
        raise PatchloomError(f"{to} holds weights alone, with no place for preprocessing inside; {able} have one.")
    for package in (*form.packages, *(("nncf",) if int8 and to == "openvino" else ())):
        if find_spec(package) is None:
            raise PatchloomError(f"Exporting to {to} needs {package}, which is not installed: {install_hint('export')}")
    return form


def make(request: Request, to: str) -> Artefact:
    return import_module(f"patchloom.exporting.{FORMATS[to].module}").make(request, to)


def metadata(request: Request, found: dict[str, Any]) -> dict[str, str]:
    """What a file says of itself, a string a key; all but the plain words are JSON."""
    network, how = request.network, request.network.preprocessing.to_json()
    about = {
        "patchloom_version": __version__,
        "architecture": network.config.name,
        "config": network.config.to_json(),
        "input": describe_input(request),
        "preprocessing": how,
        **how,
        "int8": request.int8,
        **({"quantisation": request.quantisation} if request.quantisation else {}),
        **found,
    }
    if network.class_names is not None:
        about["class_names"] = network.class_names
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}


def write_through_memory(path: Path, save: Callable[[IO[bytes]], Any]) -> None:
    """Torch's own writer says nothing of a full disk, and may end the process: it writes to memory alone."""
    memory = io.BytesIO()
    save(memory)
    path.write_bytes(memory.getbuffer())


def describe_input(request: Request) -> str:
    if request.with_preprocessing:
        return "uint8 NHWC pixels, resized and cropped; normalised inside"
    return "float32 NCHW, resized, cropped and normalised"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters and quantisers say to themselves: our own output may be read by a program."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, _stdout(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _stdout(stream: Any) -> Iterator[None]:
    out, err = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = stream
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
