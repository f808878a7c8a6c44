"""Splits of the data sets that transfer recipes are for."""

from __future__ import annotations

import pytest

from patchloom.data.splits import Splits
from patchloom.recipes.transfer import official_splits


@pytest.mark.parametrize(
    ("recipe", "asked", "expected"),
    [
        ("transfer_flowers@small", Splits(), Splits("train+val", "test")),
        ("grafit_transfer", Splits(), Splits("train+val", "test")),
        ("transfer_flowers", Splits(test="val"), Splits("train", "val")),
        ("transfer_flowers", Splits("train"), Splits("train", "test")),
        ("transfer_flowers", Splits("test"), Splits("test")),
        ("transfer_flowers", Splits(hold_out=0.1), Splits("train+val", None, 0.1)),
        ("deit", Splits(), Splits()),
    ],
)
def test_transfer_recipes_take_the_official_split_of_flowers(recipe: str, asked: Splits, expected: Splits) -> None:
    assert official_splits("torchvision:Flowers102:/data", recipe, asked) == expected
    assert official_splits("torchvision:Food101:/data", recipe, asked) == asked
    assert official_splits("/data/Flowers102", recipe, asked) == asked
