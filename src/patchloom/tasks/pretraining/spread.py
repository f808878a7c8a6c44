"""Numbers that show a collapse: how far features of different images lie apart."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def feature_spread(vectors: Tensor) -> float:
    """The standard deviation of unit vectors (N, D) over images, times the square root of D and averaged: 1 for vectors
    in all directions, 0 if all images have the same."""
    units = F.normalize(vectors.float(), dim=1)
    return float(units.std(dim=0, correction=0).mean() * units.shape[1] ** 0.5)


SAME = 0.02  # the spread of features that are the same for every image


def same_features(spread: float) -> str | None:
    """What to say where the features of all images are the same; None where they differ."""
    if spread > SAME:
        return None
    return (
        f"The features of all images are the same (std {spread:.4f}, 1 in a random direction for each). Likely cause: "
        "images that are all alike, or a learning rate that is too high. Look at the images, then lower lr or give "
        "more warmup_epochs."
    )
