"""OpenVINO files (.xml and .bin), converted from the ONNX graph; NNCF compresses weights to int8."""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.exporting.formats import Request, Runner, metadata, quiet
from patchloom.exporting.onnx import to_onnx
from patchloom.models.heads import PerClassHead
from patchloom.models.network import Network

SECTION = "model_info"  # section of rt_info that OpenVINO's tools use for labels and similar metadata


def import_silently(name: str) -> ModuleType:
    """Import OpenVINO or NNCF without their telemetry, which otherwise sends a report over the network on import."""
    reports = "openvino_telemetry"
    before = {reports: sys.modules[reports]} if reports in sys.modules else {}
    # None in sys.modules makes an import fail, which OpenVINO takes for "not installed".
    sys.modules[reports] = None  # type: ignore[assignment]
    try:
        return import_module(name)
    finally:
        del sys.modules[reports]
        sys.modules.update(before)


class MatmulHead(nn.Module):
    """PerClassHead as one matrix product per class: (B, classes, D) -> (B, classes).

    OpenVINO's CPU plugin (seen in 2026.4.1; issue 23616) fuses the Add after a ReduceSum over the last axis of three
    into the sum, and then indexes the bias by image instead of by class: batches of two or more get wrong logits.
    """

    def __init__(self, head: PerClassHead) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ self.weight.unsqueeze(-1)).flatten(1) + self.bias


def without_sums(network: Network) -> Network:
    """The network in a form that OpenVINO compiles correctly: a copy if its head has to change.

    The file is still compared with the network itself.
    """
    head = getattr(network, "head", None)
    if not isinstance(head, PerClassHead):
        return network
    changed = copy.deepcopy(network)
    changed.head = MatmulHead(head)
    return changed


class OpenvinoFile:
    """An .xml file with its .bin file, with its metadata in rt_info."""

    def __init__(self, request: Request) -> None:
        import onnx

        self.request = request
        self.core = import_silently("openvino").Core()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.onnx"
            onnx.save(to_onnx(replace(request, network=without_sums(request.network))), path)
            # not convert_model, which does the same but sends telemetry
            model = self.core.read_model(path)
        self.model = compressed(model) if request.int8 else model

    def write(self, path: Path, found: dict[str, Any]) -> None:
        for key, value in metadata(self.request, found).items():
            self.model.set_rt_info(value, [SECTION, key])
        # compress_to_fp16 is on by default and would round all weights.
        import_silently("openvino").save_model(self.model, path, compress_to_fp16=False)

    def open(self, path: Path) -> Runner:
        # Without the hint the CPU plugin may compute in bf16, and the comparison would measure that.
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = self.core.compile_model(path, "CPU", exact)

        def run(images: np.ndarray) -> np.ndarray:
            return compiled({"input": images})["logits"]

        return run


def compressed(model: Any) -> Any:
    """Store all weights in 8 bits with one scale per row; matrix products stay in float.

    Products in int8, calibrated on photos, change logits ten times as much and fail with dynamic sizes (OpenVINO's
    issue 19134).
    """
    with quiet():
        nncf = import_silently("nncf")
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def make(request: Request, to: str) -> OpenvinoFile:  # noqa: ARG001 - one of several formats
    return OpenvinoFile(request)
