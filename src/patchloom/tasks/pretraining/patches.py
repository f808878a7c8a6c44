"""Patches of pixels for MAE: which ones stay visible, the targets of the masked ones, and the loss.

Shapes: images (B, C, height, width); patches (B, N, P) with the P = p * p * C pixels of each, N patches row-major.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from patchloom.data.randomness import seed_of

_EPS = 1e-6  # in the variance of a patch, as published: a flat patch becomes zeros


def visible_count(patches: int, mask_ratio: float) -> int:
    """How many of `patches` patches stay visible: rounded down, so that at least one is masked."""
    # 10 * (1 - 0.9) is 0.99999: the small term makes it 1
    return int(patches * (1 - mask_ratio) + 1e-6)


def patch_order(patches: int, seed: int) -> np.ndarray:
    """The patches of one sample in random order (N,) int64, drawn from its seed: the first ones stay visible."""
    return np.random.default_rng(seed_of(seed, "mask")).permutation(patches)


def to_patches(images: Tensor, size: int) -> Tensor:
    """The pixels of each patch of `size` x `size`: (B, C, height, width) -> (B, N, size * size * C), channels last."""
    grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C, rows, size, columns, size)
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def to_images(patches: Tensor, size: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `to_patches` for a grid of (rows, columns) patches."""
    pixels = patches.unflatten(2, (size, size, -1)).unflatten(1, grid)  # (B, rows, columns, size, size, C)
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each patch, (B, N, 1) each."""
    variance, mean = patches.var(dim=-1, keepdim=True), patches.mean(dim=-1, keepdim=True)
    return mean, (variance + _EPS).sqrt()


def normalised(patches: Tensor) -> Tensor:
    """Each patch with mean 0 and standard deviation 1: MAE's better target."""
    mean, deviation = patch_statistics(patches)
    return (patches - mean) / deviation


def gather_patches(patches: Tensor, indices: Tensor) -> Tensor:
    """The patches with these indices: (B, N, P) and (B, M) -> (B, M, P)."""
    return patches.gather(1, indices[:, :, None].expand(-1, -1, patches.shape[-1]))


def pixel_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over the pixels of masked patches (B, M, P), one value per image (B,).

    Predicting the mean of every normalised patch has a loss of 1 - 1 / P, a flat patch one of 0.
    """
    return (predicted.float() - target).square().mean(dim=(1, 2))
