"""Block-wise masks of BeiT."""

from __future__ import annotations

import random

import numpy as np
import pytest

from patchloom.tasks.pretraining.masks import block_mask, hidden_patches


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (8, 5), (1, 9), (2, 1), (24, 24)])
@pytest.mark.parametrize("ratio", [0.05, 75 / 196, 0.9])
def test_every_image_has_exactly_as_many_masked_patches(grid: tuple[int, int], ratio: float) -> None:
    patches = grid[0] * grid[1]
    hidden = hidden_patches(ratio, patches)
    assert 1 <= hidden < patches
    for seed in range(50):
        mask = block_mask(grid, hidden, random.Random(seed), smallest=16)
        assert mask.shape == (patches,)
        assert mask.dtype == bool
        assert int(mask.sum()) == hidden


def test_the_published_setting_masks_75_of_196_patches() -> None:
    assert hidden_patches(75 / 196, 196) == 75


def test_a_mask_depends_on_its_generator_alone() -> None:
    one, again, other = (block_mask((14, 14), 75, random.Random(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_a_single_block_is_a_rectangle_within_the_aspect() -> None:
    """As many patches as the smallest block has: one block fills the mask, or two where it was rounded down."""
    seen = 0
    for seed in range(200):
        mask = block_mask((20, 20), 24, random.Random(seed), smallest=24, aspect=0.5).reshape(20, 20)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        if height * width == 24:
            seen += 1
            assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            assert 0.4 <= height / width <= 2.5  # sides are rounded
    assert seen > 20


def test_masked_patches_lie_together() -> None:
    """A masked patch has a masked neighbour to its right far more often than in a mask of single patches."""
    masks = [block_mask((14, 14), 75, random.Random(seed)).reshape(14, 14) for seed in range(100)]
    pairs = np.mean([(mask[:, :-1] & mask[:, 1:]).sum() / mask[:, :-1].sum() for mask in masks])
    assert pairs > 0.75 > 2 * 75 / 196 - 0.05
