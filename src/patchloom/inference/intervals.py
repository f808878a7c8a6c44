"""How certain a measured accuracy is."""

from __future__ import annotations

import math
from statistics import NormalDist

from patchloom.text import count

FEW_IMAGES = 100  # below, an accuracy is uncertain by 10 points or more


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction (Wilson, 1927): sound for few images and near 0 and 1 too.

    Returns:
        (low, high), fractions. The simple interval p +- 1.96 sqrt(p (1 - p) / n) would be empty for p = 0 or 1.
    """
    if not count:
        return 0.0, 1.0
    # 1.96: 2.5 % are cut off at either end.
    z = NormalDist().inv_cdf(0.975)
    middle = (correct + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(correct * (count - correct) / count + z * z / 4)
    # exact at the ends: rounding must not leave the fraction itself outside
    return 0.0 if correct == 0 else middle - half, 1.0 if correct == count else middle + half


def few_images_warning(number: int) -> str | None:
    """A warning if an accuracy is measured on too few images, else None."""
    if number >= FEW_IMAGES:
        return None
    low, high = wilson_interval(number // 2, number)
    return (
        f"Warning: accuracy is measured on {count(number, 'image')}, fewer than {FEW_IMAGES}. It is "
        f"uncertain by up to {50 * (high - low):.0f} percentage points either way; hold out more images "
        "before comparing models."
    )
