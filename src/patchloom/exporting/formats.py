"""The registry of formats: packages and features of each, and the metadata of all files."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from patchloom import __version__
from patchloom.data.images import to_input
from patchloom.errors import PatchloomError, check_choice
from patchloom.install import install_hint
from patchloom.models.network import Network

Runner = Callable[[np.ndarray], np.ndarray]  # images as the file takes them -> logits (B, classes)


@dataclass(frozen=True)
class Request:
    """A network on the CPU, in float32 and eval mode, and the options of the export."""

    network: Network
    int8: bool
    with_preprocessing: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the logits to compare with
    calibration: Tensor | None = None  # (N, height, width, C) uint8, for the ranges of int8 activations

    @property
    def any_size(self) -> bool:
        """Whether height and width are dynamic. With one row or column of patches, torch.export would fix them."""
        return self.network.traces_any_size and min(self.network.config.grid) > 1

    @property
    def quantisation(self) -> str | None:
        """Where int8 activations get their ranges: from each input (dynamic) or from images (percentile)."""
        return None if not self.int8 else "dynamic" if self.calibration is None else "percentile"

    def as_input(self, pixels: Tensor) -> np.ndarray:
        """Convert pixels (B, height, width, C), resized and cropped, to the input of the file."""
        if self.with_preprocessing:
            return pixels.numpy()
        return to_input(pixels, self.network.preprocessing).contiguous().numpy()


class Artefact(Protocol):
    """A network converted to one format. It is written once for verification, and again with the result as metadata."""

    def write(self, path: Path, found: dict[str, Any]) -> None: ...

    def open(self, path: Path) -> Runner:
        """A function that runs the file as its users will."""
        ...


@dataclass(frozen=True)
class Format:
    """A format: its file suffixes, the module that writes it, and its features."""

    suffixes: tuple[str, ...]
    module: str  # has make(request, format name) -> Artefact
    packages: tuple[str, ...] = ()
    graph: bool = True  # whether it is a program, which can include preprocessing, or only weights
    int8: bool = False
    calibrates: bool = False  # whether int8 can also use ranges of activations from images


FORMATS = {
    "onnx": Format((".onnx",), "onnx", ("onnx", "onnxscript", "onnxruntime"), int8=True, calibrates=True),
    "openvino": Format((".xml",), "openvino", ("onnx", "onnxscript", "openvino"), int8=True),
    "torch": Format((".pt2",), "graph"),
    "safetensors": Format((".safetensors",), "weights", graph=False),
    "timm": Format((".safetensors",), "weights", graph=False),
    "official": Format((".safetensors", ".pth"), "weights", graph=False),
}


def find_format(to: str, int8: bool, with_preprocessing: bool) -> Format:
    """The format of this name; raises PatchloomError if it lacks a requested feature or a package is not installed."""
    check_choice("--to", to, FORMATS)
    form = FORMATS[to]
    if int8 and not form.int8:
        able = " and ".join(name for name, other in FORMATS.items() if other.int8)
        raise PatchloomError(f"{to} does not support int8; {able} do.")
    if with_preprocessing and not form.graph:
        able = ", ".join(name for name, other in FORMATS.items() if other.graph)
        raise PatchloomError(f"{to} contains only weights and cannot include preprocessing; {able} can.")
    for package in (*form.packages, *(("nncf",) if int8 and to == "openvino" else ())):
        # find_spec looks without importing: these packages take seconds to load.
        if find_spec(package) is None:
            raise PatchloomError(f"Exporting to {to} needs {package}, which is not installed: {install_hint('export')}")
    return form


def make(request: Request, to: str) -> Artefact:
    """Convert the network to a format, whose module is imported on use."""
    return import_module(f"patchloom.exporting.{FORMATS[to].module}").make(request, to)


def metadata(request: Request, found: dict[str, Any]) -> dict[str, str]:
    """The metadata of a file, one string per key; values other than strings are JSON."""
    network, preprocessing = request.network, request.network.preprocessing.to_json()
    values = {
        "patchloom_version": __version__,
        "architecture": network.config.name,
        "config": network.config.to_json(),
        "input": describe_input(request),
        "preprocessing": preprocessing,
        **preprocessing,
        "int8": request.int8,
        **({"quantisation": request.quantisation} if request.quantisation else {}),
        **found,
    }
    if network.class_names is not None:
        values["class_names"] = network.class_names
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def write_through_memory(path: Path, save: Callable[[IO[bytes]], Any]) -> None:
    """Let torch write to memory, then write the file: torch does not report a full disk and may end the process.

    Args:
        save: writes to the file object that it gets, such as torch.save with its first argument bound.
    """
    memory = io.BytesIO()
    save(memory)
    path.write_bytes(memory.getbuffer())


def describe_input(request: Request) -> str:
    """The expected input, for the metadata."""
    if request.with_preprocessing:
        return "uint8 NHWC pixels, resized and cropped; normalised inside"
    return "float32 NCHW, resized, cropped and normalised"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters and quantisers, since a program may read our output."""
    before = logging.root.manager.disable
    # disable() is global and overrides every logger, whatever level a library sets for itself.
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
