"""Resizing of tensors that depend on the image size, and of stems for other input channels.

All functions take float32: half precision would round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.layers.positions import Grid, resize_positions


def resize_cross_patch(matrix: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resize a ResMLP matrix (N, N) to another grid, rows and columns like positions.

    The result is divided by the growth in patches, so that sums over a row, and the output for a constant image, stay.
    """
    # Columns are the patches that are read, rows those that are written: both lie on the grid.
    columns = _resize_columns(matrix, old, new)
    return _resize_columns(columns.T, old, new).T * _growth(new, old)


def resize_patch_vector(vector: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resize a bias (N,) to another grid."""
    return _resize_columns(vector[None], old, new)[0]


def resize_class_mlp(row: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resize the row of a class-MLP, (1, 1 + N); the weight of the class token stays."""
    return torch.cat([row[:, :1], _resize_columns(row[:, 1:], old, new) * _growth(new, old)], dim=1)


def resize_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt a stem kernel (D, C, k, k) to another number of input channels: repeated in turn and divided by the
    growth.

    For one channel this is the sum over the old ones, so that a grey image gives the same tokens as its RGB copy.
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    # RGBRG... for five channels; the factor keeps the sum, and with it the scale of the tokens.
    return weight[:, torch.arange(channels) % old] * (old / channels)


def _resize_columns(matrix: Tensor, old: Grid, new: Grid) -> Tensor:
    """(rows, old patches) -> (rows, new patches)."""
    return resize_positions(matrix.T[None], old, new)[0].T


def _growth(new: Grid, old: Grid) -> float:
    """One over the growth in patches.

    Interpolation keeps values; with more columns their sum grows, so each is divided by the growth.
    """
    return old[0] * old[1] / (new[0] * new[1])
