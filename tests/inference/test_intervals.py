"""An accuracy comes with its 95 % interval."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from patchloom.inference.intervals import few_images_warning, wilson_interval


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 60), (56, 60), (60, 60), (7, 13), (9_500, 10_000)])
def test_the_interval_is_that_of_scipy(correct: int, count: int) -> None:
    theirs = binomtest(correct, count).proportion_ci(method="wilson")
    assert wilson_interval(correct, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_few_images_are_a_warning_and_many_are_not() -> None:
    assert few_images_warning(100) is None
    warning = few_images_warning(60)
    assert warning is not None
    assert "60 images, fewer than 100" in warning
    assert "12 percentage points" in warning
