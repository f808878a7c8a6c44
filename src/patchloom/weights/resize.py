"""Tensors that depend on the image size, carried to another one; and stems carried to other channels.

All take float32: half precision would round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.layers.positions import Grid, resize_positions


def resize_cross_patch(matrix: Tensor, old: Grid, new: Grid) -> Tensor:
    """A ResMLP matrix (patches, patches) at another grid: rows and columns as positions are resized.

    Divided by the growth in patches, so that a constant image is mixed as before.
    """
    columns = _resize_columns(matrix, old, new)
    return _resize_columns(columns.T, old, new).T * _growth(new, old)


def resize_patch_vector(vector: Tensor, old: Grid, new: Grid) -> Tensor:
    """A bias (patches,) at another grid."""
    return _resize_columns(vector[None], old, new)[0]


def resize_class_mlp(row: Tensor, old: Grid, new: Grid) -> Tensor:
    """A class-MLP row (1, 1 + patches): the class token's own weight stays."""
    return torch.cat([row[:, :1], _resize_columns(row[:, 1:], old, new) * _growth(new, old)], dim=1)


def resize_channels(weight: Tensor, channels: int) -> Tensor:
    """A stem kernel (D, C, k, k) for another number of input channels: repeated in turn, divided by the growth.

    For one channel this is the sum over the old ones, so that a grey image gives what its RGB copy gave.
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, torch.arange(channels) % old] * (old / channels)


def _resize_columns(matrix: Tensor, old: Grid, new: Grid) -> Tensor:
    """(rows, old patches) -> (rows, new patches)."""
    return resize_positions(matrix.T[None], old, new)[0].T


def _growth(new: Grid, old: Grid) -> float:
    return old[0] * old[1] / (new[0] * new[1])
