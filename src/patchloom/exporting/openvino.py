"""OpenVINO files, .xml and .bin, read from the ONNX graph; int8 by NNCF, calibrated on images."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.exporting.formats import Request, Runner, metadata, quiet
from patchloom.exporting.onnx import to_onnx

SECTION = "model_info"  # of rt_info, where OpenVINO's own tools keep labels and the like


class OpenvinoFile:
    def __init__(self, request: Request) -> None:
        import onnx
        import openvino

        self.request = request
        self.core = openvino.Core()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.onnx"
            onnx.save(to_onnx(request), path)
            # not convert_model, which is the same for an ONNX file but reports its use over the network
            model = self.core.read_model(path)
        self.model = self._quantised(model) if request.int8 else model

    def _quantised(self, model: Any) -> Any:
        os.environ.setdefault("NNCF_CI", "1")  # it reports its use over the network otherwise
        images = self.request.calibration
        assert images is not None
        with quiet():
            import nncf

            return nncf.quantize(
                model,
                nncf.Dataset([self.request.as_input(image) for image in images.split(1)]),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(images),
                ignored_scope=nncf.IgnoredScope(names=_left_products(model)),
            )

    def write(self, path: Path, found: dict[str, Any]) -> None:
        import openvino

        for key, value in metadata(self.request, found).items():
            self.model.set_rt_info(value, [SECTION, key])
        openvino.save_model(self.model, path, compress_to_fp16=False)

    def open(self, path: Path) -> Runner:
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = self.core.compile_model(path, "CPU", exact)

        def run(images: np.ndarray) -> np.ndarray:
            return compiled({"input": images})["logits"]

        return run


def _left_products(model: Any) -> list[str]:
    """Products with weights on the left, as of talking heads: their int8 form does not compile for the CPU."""
    products = (node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul")
    return [
        node.get_friendly_name()
        for node in products
        if node.input_value(0).get_node().get_type_name() == "Constant"
    ]


def make(request: Request, to: str) -> OpenvinoFile:  # noqa: ARG001 - one of several formats
    return OpenvinoFile(request)
