"""Block-wise masks of BeiT (Bao et al. 2022, algorithm 1): rectangles of patches, drawn until enough are hidden."""

from __future__ import annotations

import math
import random

import numpy as np

_TRIES = 10  # for one block, as in the published code


def block_mask(
    grid: tuple[int, int], hidden: int, draw: random.Random, smallest: int = 16, aspect: float = 0.3
) -> np.ndarray:
    """A mask (N,) bool over a grid of patches, row-major, with exactly `hidden` patches True.

    Blocks have at least `smallest` patches, or as many as are still to hide, and sides whose ratio lies between
    `aspect` and its inverse; they may overlap. What no block fits is hidden patch by patch, so that every image has as
    many hidden patches.
    """
    mask = np.zeros(grid, dtype=bool)
    left = hidden
    while left:
        block = _fitting_block(mask, left, draw, min(smallest, left), aspect)
        if block is None:
            break
        mask[block] = True
        left = hidden - int(mask.sum())
    flat = mask.reshape(-1)
    if left:
        flat[draw.sample(np.flatnonzero(~flat).tolist(), left)] = True
    return flat


def _fitting_block(
    mask: np.ndarray, left: int, draw: random.Random, smallest: int, aspect: float
) -> tuple[slice, slice] | None:
    """A block that hides at least one patch more, and at most `left`; None if none was drawn."""
    rows, columns = mask.shape
    for _ in range(_TRIES):
        area = draw.uniform(smallest, left)
        ratio = math.exp(draw.uniform(math.log(aspect), -math.log(aspect)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if not (0 < height <= rows and 0 < width <= columns):
            continue
        top, start = draw.randint(0, rows - height), draw.randint(0, columns - width)
        block = slice(top, top + height), slice(start, start + width)
        if 0 < height * width - int(mask[block].sum()) <= left:
            return block
    return None


def hidden_patches(ratio: float, patches: int) -> int:
    """How many of the patches of an image are hidden: at least one, and never all."""
    return min(max(1, round(ratio * patches)), patches - 1)
