"""OpenVINO files, .xml and .bin, read from the ONNX graph; int8 weights by NNCF."""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from patchloom.exporting.formats import Request, Runner, metadata, quiet
from patchloom.exporting.onnx import to_onnx

SECTION = "model_info"  # of rt_info, where OpenVINO's own tools keep labels and the like


def import_silently(name: str) -> ModuleType:
    """OpenVINO or NNCF as if their reports of use were not installed: the mere import sends one over the network."""
    reports = "openvino_telemetry"
    before = {reports: sys.modules[reports]} if reports in sys.modules else {}
    sys.modules[reports] = None  # type: ignore[assignment]
    try:
        return import_module(name)
    finally:
        del sys.modules[reports]
        sys.modules.update(before)


class OpenvinoFile:
    def __init__(self, request: Request) -> None:
        import onnx

        self.request = request
        self.core = import_silently("openvino").Core()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.onnx"
            onnx.save(to_onnx(request), path)
            # not convert_model, which is the same for an ONNX file but reports its use over the network
            model = self.core.read_model(path)
        self.model = compressed(model) if request.int8 else model

    def write(self, path: Path, found: dict[str, Any]) -> None:
        for key, value in metadata(self.request, found).items():
            self.model.set_rt_info(value, [SECTION, key])
        import_silently("openvino").save_model(self.model, path, compress_to_fp16=False)

    def open(self, path: Path) -> Runner:
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = self.core.compile_model(path, "CPU", exact)

        def run(images: np.ndarray) -> np.ndarray:
            return compiled({"input": images})["logits"]

        return run


def compressed(model: Any) -> Any:
    """All weights in 8 bits, a scale a row. Products stay in float: in int8, calibrated on photos, they change logits
    ten times as much, and free sizes fail (OpenVINO's issue 19134)."""
    with quiet():
        nncf = import_silently("nncf")
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def make(request: Request, to: str) -> OpenvinoFile:  # noqa: ARG001 - one of several formats
    return OpenvinoFile(request)
