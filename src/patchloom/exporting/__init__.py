"""Networks as files for other programs: onnx, openvino, torch, and weights in three layouts."""

from patchloom.exporting.exporter import Report, export

__all__ = ["Report", "export"]
