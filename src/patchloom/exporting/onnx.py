"""ONNX files: the graph of the exported program, verified with onnxruntime, which also quantises to int8."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patchloom import __version__
from patchloom.errors import PatchloomError
from patchloom.exporting.formats import Request, Runner, metadata, quiet
from patchloom.exporting.graph import capture

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 18
MAX_BYTES = 2**31 - 2**24  # a protobuf message is limited to 2 GB, of which the graph needs some
_QUANTISED = ["MatMul", "Gemm"]
_PERCENTILE = 99.99
_AT_ONCE = 8  # images whose activations are in memory at once; must divide the number of images


def to_onnx(request: Request) -> ModelProto:
    """The graph with the input `input` and the output `logits`, without paths of this machine.

    Raises PatchloomError if the weights exceed the 2 GB of an ONNX file.
    """
    size = sum(tensor.nbytes for tensor in request.network.state_dict().values())
    if size > MAX_BYTES:
        raise PatchloomError(
            f"{request.network.config.name} has {size / 1e9:.1f} GB of weights, but an ONNX file is limited to 2 GB. "
            f"Use --to torch."
        )
    program = capture(request)
    with quiet():
        exported = torch.onnx.export(
            program, dynamo=True, input_names=["input"], output_names=["logits"], opset_version=OPSET, verbose=False
        )
    assert exported is not None
    model = exported.model_proto
    clean(model)
    _name_sizes(model, request)
    return model


def clean(model: ModelProto) -> None:
    """Remove the exporter's notes on shapes, modules and source lines."""
    graph = model.graph
    # The exporter records source lines and file names of this machine in every node.
    del graph.value_info[:], graph.metadata_props[:], model.metadata_props[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    model.producer_name, model.producer_version = "patchloom", __version__


def _name_sizes(model: ModelProto, request: Request) -> None:
    names = {0: "batch"}
    if request.any_size:
        names |= {1: "height", 2: "width"} if request.with_preprocessing else {2: "height", 3: "width"}
    dims = model.graph.input[0].type.tensor_type.shape.dim
    for place, name in names.items():
        # Symbolic names instead of torch's s0 and s1, so that users see which dimension is which.
        dims[place].dim_param = name
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"


def quantise(model: ModelProto) -> ModelProto:
    """Quantise the weights of all matrix products, with one scale per column, and activations dynamically.

    Weights are signed, which is fastest with VNNI, and use 7 bits, so that sums do not overflow without VNNI.

    Returns:
        A new model; the input of the graph stays float32.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    return _through_files(
        model,
        partial(
            quantize_dynamic,
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        ),
    )


def quantise_calibrated(model: ModelProto, inputs: np.ndarray) -> ModelProto:
    """Quantise weights as `quantise` does, and activations with fixed ranges that contain 99.99 % of the values on
    `inputs`, so that rare large values do not reduce the precision of all others."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    return _through_files(
        model,
        partial(
            quantize_static,
            calibration_data_reader=_Batches(inputs),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.Percentile,
            extra_options={
                "MatMulConstBOnly": True,
                "CalibPercentile": _PERCENTILE,
                "CalibStridedMinMax": _AT_ONCE,  # applies to percentiles too, despite its name
                "OpTypesToExcludeOutputQuantization": _QUANTISED,  # outputs stay in float, as with dynamic ranges
            },
        ),
    )


class _Batches:
    """Reader of single images for onnxruntime's calibration, which processes them in ranges to limit its memory."""

    def __init__(self, inputs: np.ndarray) -> None:
        self._inputs = inputs
        self.set_range(0, len(inputs))

    def __len__(self) -> int:
        return len(self._inputs)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._rows = iter(self._inputs[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        row = next(self._rows, None)
        return None if row is None else {"input": row[None]}


def _through_files(model: ModelProto, quantiser: Callable[..., Any]) -> ModelProto:
    import onnx

    with tempfile.TemporaryDirectory() as folder, quiet():
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        # onnxruntime's quantiser works from file to file.
        onnx.save(model, before)
        quantiser(before, after)
        return onnx.load(after)


class OnnxFile:
    """An .onnx file, with its metadata as model properties."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.model = to_onnx(request)
        if request.calibration is not None:
            self.model = quantise_calibrated(self.model, request.as_input(request.calibration))
        elif request.int8:
            self.model = quantise(self.model)

    def write(self, path: Path, found: dict[str, Any]) -> None:
        import onnx

        # Written twice, before and after verification: the first values must not stay.
        del self.model.metadata_props[:]
        onnx.helper.set_model_props(self.model, metadata(self.request, {"opset": OPSET, **found}))
        onnx.save(self.model, path)

    def open(self, path: Path) -> Runner:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # As many threads as torch has: by default onnxruntime takes every core.
        options.intra_op_num_threads = torch.get_num_threads()
        # Only fatal errors: warnings about the graph would end up in a program's output.
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(images: np.ndarray) -> np.ndarray:
            return session.run(["logits"], {"input": images})[0]

        return run


def make(request: Request, to: str) -> OnnxFile:  # noqa: ARG001 - one of several formats
    return OnnxFile(request)
