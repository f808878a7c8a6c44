"""Positions: tables at another grid of patches, when weights are loaded and on a call with images of another size; and
fixed sines and cosines.
"""

from __future__ import annotations

import math

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


def sinusoids(length: int, dim: int) -> Tensor:
    """Positions (length, dim) as sines and cosines of geometrically spaced frequencies (Vaswani et al., 3.5)."""
    frequencies = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def grid_sinusoids(grid: Grid, dim: int) -> Tensor:
    """Positions (height * width, dim) of patches, row-major: `sinusoids` of the row, then of the column.

    `dim` is a multiple of 4.
    """
    rows, columns = (sinusoids(length, dim // 2) for length in grid)
    whole = (*grid, -1)
    return torch.cat([rows[:, None].expand(whole), columns[None].expand(whole)], dim=-1).flatten(0, 1)
