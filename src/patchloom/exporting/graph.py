"""A network as a graph: torch's exported program, from which ONNX and OpenVINO graphs are made."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from patchloom.exporting.formats import Request, Runner, metadata, quiet, write_through_memory
from patchloom.models.network import Network


class Preprocessed(nn.Module):
    """(B, height, width, C) uint8 -> logits (B, classes): normalisation and the change of layout, then the network."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        preprocessing = network.preprocessing
        # Times 255: pixels come as bytes, mean and std are for values in 0 to 1.
        self.register_buffer("mean", 255 * torch.tensor(preprocessing.mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(preprocessing.std)[:, None, None])

    def forward(self, pixels: Tensor) -> Any:
        return self.network((pixels.permute(0, 3, 1, 2).float() - self.mean) / self.std)


def capture(request: Request) -> ExportedProgram:
    """Trace the network for any batch size and, if they are dynamic, any height and width of at least two patches."""
    network, config = request.network, request.network.config
    height, width = config.img_size
    # torch.export takes sizes of 0 and 1 for constants, so the example has two images.
    example = torch.zeros(2, config.in_chans, height, width)
    rows, columns = 2, 3
    module: nn.Module = network
    if request.with_preprocessing:
        example, module = example.permute(0, 2, 3, 1).to(torch.uint8).contiguous(), Preprocessed(network).eval()
        # Pixels come as (B, height, width, C).
        rows, columns = 1, 2
    shape: dict[int, Any] = {0: Dim("batch", min=1)}
    if request.any_size:
        # A multiple of the patch size: tracing proves that the grid has no remainder.
        shape |= {rows: config.patch_size * Dim("rows", min=2), columns: config.patch_size * Dim("columns", min=2)}
    with torch.no_grad(), quiet():
        # strict=False traces by running Python, which takes modules that TorchDynamo cannot.
        program = torch.export.export(module, (example,), dynamic_shapes=(shape,), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


class TorchProgram:
    """A .pt2 file, with its metadata in the extra file metadata.json."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.program = capture(request)

    def write(self, path: Path, found: dict[str, Any]) -> None:
        extra = {"metadata.json": json.dumps(metadata(self.request, found))}
        with quiet():
            write_through_memory(path, partial(torch.export.save, self.program, extra_files=extra))

    def open(self, path: Path) -> Runner:
        with quiet():
            module = torch.export.load(path).module()

        def run(images: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return module(torch.from_numpy(images)).numpy()

        return run


def make(request: Request, to: str) -> TorchProgram:  # noqa: ARG001 - one of several formats
    return TorchProgram(request)
