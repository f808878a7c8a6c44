"""What a query is and how its neighbours are reported; used by `Index`."""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from patchloom.inference.neighbours import Nearest
from patchloom.search.storage import Column


class Queries(NamedTuple):
    """Images to search with: their names, unit vectors (Q, D), and the network's coarse probabilities if asked for."""

    names: list[str]
    vectors: np.ndarray
    softmax: Tensor | None


def without(found: Nearest, place: int | None, k: int) -> Nearest:
    """The first `k` neighbours of one query without the item at `place`; all that were found if it is None."""
    if place is None:
        return found
    kept = (found.places[0] != place).nonzero().flatten()[:k]
    return Nearest(found.scores[:, kept], found.places[:, kept])


def probabilities_of(column: Column, votes: Tensor) -> dict[str, float]:
    """{class: probability} of one image, the likeliest first; classes that no neighbour has are left out."""
    order = votes.argsort(descending=True, stable=True).tolist()
    return {column.names[i]: float(votes[i]) for i in order if votes[i] > 0}


def query_name(image: Any, place: int) -> str:
    """The path of an image, or its number where it has none."""
    return str(image) if isinstance(image, str | PathLike) else f"image {place + 1}"
