"""Position tables at another grid of patches: when weights are loaded, and on a call with images of another size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int]  # patches along the height and along the width


def resize_positions(table: Tensor, old: Grid, new: Grid, prefix: int = 0) -> Tensor:
    """A table (1, prefix + N, D) at another grid: bicubic, half-pixel centres, no antialiasing, as the authors do.

    The rows of prefix tokens stay as they are. Takes float32 or float64: half precision would round twice.
    """
    head, patches = table[:, :prefix], table[:, prefix:]
    grid = patches.transpose(1, 2).unflatten(2, old)
    resized = F.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([head, resized.flatten(2).transpose(1, 2)], dim=1)
