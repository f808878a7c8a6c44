"""Nearest neighbours by cosine, classification by their labels, and scores under a coarse label (Grafit, thesis 2.3).

Everything is exact and works on blocks of queries, so that no (queries, items) matrix is kept. Vectors are unit
vectors, (N, D) float32 in host memory; memory-mapped arrays are read block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.errors import PatchloomError

SIGMA = 0.05  # temperature of Eq. 2.2 and 2.6
KS = (10, 15, 20, 25, 30)  # the numbers of neighbours that leave-one-out chooses from (2.3.3)
CLAMP = 1e-4  # coarse probabilities are kept this far from 0 and 1 in Eq. 2.5, whose logarithm is then within ±9.2
_SCORES = 1 << 24  # scores in memory at a time: 64 MB
_PAIRS = 2_000_000_000  # comparisons of a leave-one-out: beyond, a part of the items is left out, one after the other

Vectors = np.ndarray | Tensor


class Nearest(NamedTuple):
    """The neighbours of every query, best first: scores (Q, k) float32 and places (Q, k) int64 among the items."""

    scores: Tensor
    places: Tensor


def normalise(vectors: Vectors) -> Tensor:
    """Unit vectors, (N, D) float32. A vector of zeros stays as it is: its cosine with everything is 0."""
    return torch.nn.functional.normalize(torch.as_tensor(vectors).float(), dim=1)


def score_blocks(queries: Vectors, items: Vectors) -> Iterator[tuple[slice, Tensor]]:
    """Cosines of all queries with all items, as blocks (part of the queries, (part, N) float32)."""
    known = torch.as_tensor(items)
    rows = max(1, _SCORES // max(1, len(known)))
    for start in range(0, len(queries), rows):
        part = slice(start, min(start + rows, len(queries)))
        yield part, torch.as_tensor(queries[part]) @ known.T


def best(scores: Tensor, k: int) -> Nearest:
    """The `k` highest of each row of (Q, N) scores, in falling order; equal scores in the order of their places."""
    count = scores.shape[1]
    if not 0 <= k <= count:
        raise PatchloomError(f"{k} neighbours were requested of {count} items.")
    if k == count:
        found = scores.sort(dim=1, descending=True, stable=True)
        return Nearest(found.values, found.indices)
    top = scores.topk(k + 1, dim=1)
    for row in (top.values[:, k] == top.values[:, k - 1]).nonzero().flatten().tolist() if k else ():
        # equal scores on both sides of the cut: topk may take any of them
        exact = scores[row].sort(descending=True, stable=True)
        top.values[row], top.indices[row] = exact.values[: k + 1], exact.indices[: k + 1]
    by_place = top.indices[:, :k].sort(dim=1)
    again = top.values[:, :k].gather(1, by_place.indices).sort(dim=1, descending=True, stable=True)
    return Nearest(again.values, by_place.values.gather(1, again.indices))


def nearest(queries: Vectors, items: Vectors, k: int, leave_out: Sequence[int] | Tensor | None = None) -> Nearest:
    """The `k` items of highest cosine for each query; `leave_out` has for each query an item that it must not find,
    such as itself."""
    left = None if leave_out is None else torch.as_tensor(leave_out)
    parts = []
    for part, scores in score_blocks(queries, items):
        if left is not None:
            scores[torch.arange(len(scores)), left[part]] = -math.inf
        parts.append(best(scores, k))
    if not parts:
        return Nearest(torch.empty(0, k), torch.empty(0, k, dtype=torch.long))
    return Nearest(*(torch.cat(some) for some in zip(*parts, strict=True)))


def vote(found: Nearest, labels: Vectors, k: int, classes: int, temperature: float = SIGMA) -> Tensor:
    """Eq. 2.6, (Q, classes) float64: the weights exp(cosine / temperature) of the `k` first neighbours, summed by class
    and divided by their sum. `labels` has the class of every item."""
    names = torch.as_tensor(labels).long()
    weights = (found.scores[:, :k].double() / temperature).softmax(dim=1)  # the largest exponent is 0: none overflows
    return torch.zeros(len(weights), classes, dtype=torch.float64).scatter_add_(1, names[found.places[:, :k]], weights)


def knn_probabilities(
    queries: Vectors,
    items: Vectors,
    labels: Vectors,
    k: int,
    temperature: float = SIGMA,
    classes: int | None = None,
) -> Tensor:
    """Eq. 2.6 for unit vectors: (Q, classes) float64. `labels` (N,) are class numbers from 0 on."""
    names = torch.as_tensor(labels).long()
    number = classes if classes is not None else int(names.max()) + 1
    return vote(nearest(queries, items, k), names, k, number, temperature)


def choose_k(vectors: Vectors, labels: Vectors, ks: Sequence[int] = KS) -> tuple[int, dict[int, float]]:
    """The number of neighbours that classifies best when every item is left out in turn (2.3.3), and the accuracy of
    each; of equal ones the smallest number.

    Numbers above that of the other items are left out; with fewer items than the smallest, all others vote. In
    collections of more than 40,000 items, evenly spread ones are classified by all others: two billion comparisons.
    """
    names = torch.as_tensor(labels).long()
    others = len(names) - 1
    possible = [k for k in ks if k <= others] or [others]
    if possible[-1] < 1:
        return 1, {}
    queries = min(len(names), max(1, _PAIRS // len(names)))
    chosen = torch.arange(queries) * len(names) // queries
    classes = int(names.max()) + 1
    right = dict.fromkeys(possible, 0)
    for places in chosen.split(1024):
        found = nearest(torch.as_tensor(vectors)[places], vectors, possible[-1], places)
        for k in possible:
            right[k] += int((vote(found, names, k, classes).argmax(dim=1) == names[places]).sum())
    accuracy = {k: count / queries for k, count in right.items()}
    return max(possible, key=lambda k: (accuracy[k], -k)), accuracy


def log_odds(probabilities: Vectors, clamp: float = CLAMP) -> Tensor:
    """log(p / (1 - p)), the second term of Eq. 2.5, (Q, classes) float64.

    Neighbours give many classes the probability 0, where it would be infinite: p is kept within [clamp, 1 - clamp].
    """
    p = torch.as_tensor(probabilities).double().clamp(clamp, 1 - clamp)
    return p.log() - (1 - p).log()


def conditioned(scores: Tensor, odds: Tensor, coarse: Vectors) -> Tensor:
    """Eq. 2.5, (Q, N) float64: cosines (Q, N) plus the query's log-odds (Q, classes) of the coarse class of each item.

    Items without a coarse class (-1) get the lowest log-odds of the query.
    """
    names = torch.as_tensor(coarse).long()
    padded = torch.cat([odds, odds.min(dim=1, keepdim=True).values], dim=1)  # place -1
    return scores.double() + padded[:, names]


def oracle(scores: Tensor, coarse_of_query: Vectors, coarse: Vectors) -> Tensor:
    """Scores (Q, N) float64 that put the items of the query's coarse class first, by cosine inside and after it."""
    same = torch.as_tensor(coarse_of_query).long()[:, None] == torch.as_tensor(coarse).long()[None]
    return scores.double() + 4.0 * same  # cosines differ by 2 at most
