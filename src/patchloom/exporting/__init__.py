"""Export of networks for other programs: ONNX, OpenVINO, PyTorch programs, and weights in three layouts.

This package imports `runs`, `inference` and what is below them; only `cli` and the public API may import it.
"""

from patchloom.exporting.exporter import Report, export

__all__ = ["Report", "export"]
