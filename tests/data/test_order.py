"""Which images a step sees: every number of images, repeats, processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.order import Order, Steps


@given(st.integers(1, 600), st.integers(1, 300), st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_as_long_as_the_data_and_sees_distinct_images(
    images: int, batch: int, repeats: int, seed: int
) -> None:
    order = Order(images, batch, repeats, seed)
    keys = order.epoch(0)
    assert len(keys) == images
    assert len(set(keys)) == images
    assert len({image for image, _, _ in keys}) == -(-images // repeats)
    assert keys != order.epoch(1) or images == 1
    assert keys == Order(images, batch, repeats, seed).epoch(0)
    steps = list(Steps(order, 0, 2 * order.steps_per_epoch))
    assert len(steps) == 2 * order.steps_per_epoch
    assert all(len(step) == min(batch, images) for step in steps)


@pytest.mark.parametrize("images", [1, 2, 255, 256, 257])
def test_repeated_augmentation_works_on_few_images_and_one_process(images: int) -> None:
    keys = Order(images, 64, 3).epoch(0)
    assert len(keys) == images
    if images >= 3:
        assert [image for image, _, _ in keys[:3]] == [keys[0][0]] * 3
        assert [repeat for _, _, repeat in keys[:3]] == [0, 1, 2]


def test_processes_share_a_batch_out() -> None:
    order = Order(100, 10, 3)
    whole = list(Steps(order, 3, 12))
    parts = [list(Steps(order, 3, 12, rank, 3)) for rank in range(3)]
    for i, batch in enumerate(whole):
        assert sorted(key for part in parts for key in part[i]) == sorted(batch)


def test_a_cut_stream_goes_on_where_it_was() -> None:
    order = Order(50, 8, 2, seed=4)
    assert list(Steps(order, 0, 30))[17:] == list(Steps(order, 17, 30))
