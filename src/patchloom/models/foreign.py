"""Networks of other libraries, by name: timm:NAME[:FILE] and .onnx files."""

from __future__ import annotations

import os

TIMM = "timm:"


def is_foreign(source: object) -> bool:
    """Whether a name stands for a network of another library: timm:NAME[:FILE] or an .onnx file."""
    return isinstance(source, str | os.PathLike) and (str(source).startswith(TIMM) or str(source).endswith(".onnx"))
