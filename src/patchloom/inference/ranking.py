"""Mean average precision over whole rankings, exact, without a (queries, items) matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchloom.inference.neighbours import Nearest, Vectors, best, score_blocks

Adjust = Callable[[slice, Tensor], Tensor]  # the part of the queries and their cosines -> scores to rank by


@dataclass(frozen=True)
class Level:
    """One label column of queries and items, as class numbers; -1 for an item without a class."""

    queries: np.ndarray  # (Q,) int
    items: np.ndarray  # (N,) int


def average_precision(scores: np.ndarray, relevant: np.ndarray) -> float:
    """The average precision of one ranking, as scikit-learn's `average_precision_score` defines it.

    `scores` (N,) of all items and `relevant` (R,), those of the relevant ones. Items of equal score enter the ranking
    together: each relevant one counts with the precision after the last of them, so that their order does not
    matter. Without a relevant item it is 0.
    """
    return _precision(np.sort(scores), np.sort(relevant))


def _precision(ordered: np.ndarray, relevant: np.ndarray) -> float:
    """The same for scores in rising order. Precision at a relevant item: relevant ones at or above its score, divided
    by all items at or above it. Sorting values alone is several times faster than ranking the items."""
    if not len(relevant):
        return 0.0
    above = len(ordered) - np.searchsorted(ordered, relevant, "left")
    right = len(relevant) - np.searchsorted(relevant, relevant, "left")
    return float((right / above).mean())


def rank(
    queries: Vectors,
    items: Vectors,
    levels: Mapping[str, Level],
    adjust: Adjust | None = None,
    k: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, np.ndarray], Nearest]:
    """The average precision of every query on every level, {column: (Q,)}, and its `k` nearest items by cosine.

    Queries and items are unit vectors. All items are ranked by cosine, or by what `adjust` makes of the cosines. An
    item is relevant if it has the class of the query. Memory is bounded: about 17 million scores at a time.
    """
    members = {column: _members(level.items) for column, level in levels.items()}
    found = {column: np.zeros(len(queries)) for column in levels}
    near: list[Nearest] = []
    for part, cosines in score_blocks(queries, items):
        near.append(best(cosines, k))
        scores = (cosines if adjust is None else adjust(part, cosines)).numpy()
        relevant = {
            column: [
                np.sort(scores[row, members[column].get(int(label), _NONE)])
                for row, label in enumerate(level.queries[part])
            ]
            for column, level in levels.items()
        }
        scores.sort(axis=1)  # in place: the block is not needed otherwise
        for column, rows in relevant.items():
            found[column][part] = [_precision(scores[row], some) for row, some in enumerate(rows)]
        if progress is not None:
            progress(part.stop)
    joined = Nearest(*(torch.cat(some) for some in zip(*near, strict=True))) if near else best(torch.empty(0, 0), 0)
    return found, joined


_NONE = np.zeros(0, dtype=np.int64)


def _members(labels: np.ndarray) -> dict[int, np.ndarray]:
    """For each class the places of its items."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    return {int(name): places for name, places in zip(names, np.split(order, starts[1:]), strict=True) if name >= 0}
