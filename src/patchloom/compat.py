"""What a CPU-only install lacks: torchvision's compiled operators.

A torchvision wheel built for CUDA cannot load its operators beside a CPU-only torch, and then even importing it (or
timm) stops with "operator torchvision::nms does not exist". Importing this module first declares what is missing, and
does nothing where the operators are there. Everything of ours that needs timm or torchvision imports it through here.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.install import needed

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []  # an operator lives as long as the library that declares it


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression of (N, 4) boxes x1 y1 x2 y2: the indices kept, best score first."""
    order = scores.argsort(descending=True, stable=True)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while order.numel():
        best, rest = order[0], order[1:]
        kept.append(best)
        sides = torch.minimum(boxes[best, 2:], boxes[rest, 2:]) - torch.maximum(boxes[best, :2], boxes[rest, :2])
        shared = sides.clamp(min=0).prod(dim=1)
        # Boxes that overlap the best one by more than the threshold (intersection over union) are dropped.
        order = rest[shared / (areas[best] + areas[rest] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else order


def _declare_missing_operators() -> None:
    _load_torchvision_library()
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    # A fragment adds to the namespace "torchvision", whether another library defines it or not.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(_SCHEMAS[name])
    if "nms" in missing:
        library.impl("nms", nms, "CompositeExplicitAutograd")
    _libraries.append(library)


def _load_torchvision_library() -> None:
    """Load torchvision's operators if they fit this torch, without importing torchvision, which would fail if not."""
    spec = find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("_C*.so"):
            with suppress(OSError):
                torch.ops.load_library(path)


_declare_missing_operators()


def import_timm() -> Any:
    """timm, with the operators declared first; a sentence instead of an ImportError where it is not installed."""
    with needed("This needs timm", "timm"):
        import timm
    return timm
