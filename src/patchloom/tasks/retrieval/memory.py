"""One vector per training image, and the kNN loss over all of them (thesis 2.3.1, Eq. 2.2 and 2.3).

Rows are in the order of classes, so that a class is one slice of them, and are shared out over the processes: each
holds a range. Vectors of the batch go to every process, partial sums of the loss and of its gradient come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.randomness import torch_generator
from patchloom.inference.neighbours import SIGMA
from patchloom.training.processes import Processes

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCORES = 1 << 22  # of queries and rows, that are in memory at a time: 16 MB
_BLOCK = 1 << 16  # rows that are drawn from one generator
_LOWEST = -1e30  # below every score


class Memory:
    """The vectors m of N training images with `labels` (N,), in float32 or half precision.

    `renormalise`: keep unit vectors, else averages of unit vectors. What the loss takes is always their direction.
    """

    def __init__(
        self,
        labels: Tensor,
        dim: int,
        processes: Processes | None = None,
        *,
        sigma: float = SIGMA,
        renormalise: bool = True,
        precision: str = "float32",
        seed: int = 0,
    ) -> None:
        self.processes, self.sigma, self.renormalise = processes or Processes(), sigma, renormalise
        self.count, self.dim = len(labels), dim
        self.images = labels.argsort(stable=True)  # (N,): the image of each row
        self.row_of = torch.empty_like(self.images)  # (N,): the row of each image
        self.row_of[self.images] = torch.arange(self.count)
        classes = int(labels.max()) + 1 if self.count else 0
        sizes = torch.bincount(labels, minlength=classes)
        self.bounds = [0, *sizes.cumsum(0).tolist()]  # class c has the rows bounds[c] to bounds[c + 1]
        # Rounded up: the last processes may hold fewer rows than the others, or none.
        share = -(-self.count // self.processes.count)
        self.first = min(self.processes.rank * share, self.count)
        self.end = min(self.first + share, self.count)
        self.vectors = self._random(seed, PRECISIONS[precision])
        self._before: list[tuple[Tensor, Tensor]] = []  # rows that an update may have to be taken back from

    def _random(self, seed: int, dtype: torch.dtype) -> Tensor:
        """Random unit vectors, the same whatever the number of processes."""
        vectors = torch.empty(self.end - self.first, self.dim, dtype=dtype)
        # Each block has a generator of its own: a process draws only the blocks that overlap its rows, and gets the
        # values that one process alone would get.
        for block in range(self.first // _BLOCK, -(-self.end // _BLOCK)):
            start = block * _BLOCK
            drawn = torch.randn(
                min(_BLOCK, self.count - start), self.dim, generator=torch_generator(seed, block, "memory")
            )
            mine = F.normalize(drawn[max(self.first - start, 0) : self.end - start], dim=1)
            place = max(start - self.first, 0)
            vectors[place : place + len(mine)] = mine
        return vectors

    def to(self, device: torch.device) -> None:
        self.vectors, self.row_of = self.vectors.to(device), self.row_of.to(device)

    def gather(self) -> Tensor:
        """All rows (N, dim), of all processes."""
        return self.processes.gather_rows(self.vectors)

    def fill(self, vectors: Tensor) -> None:
        """Take the rows (N, dim) of all processes, or those of this one."""
        mine = vectors[self.first : self.end] if len(vectors) == self.count else vectors
        self.vectors.copy_(mine)

    @torch.no_grad()
    def update(self, rows: Tensor, vectors: Tensor, *, revocable: bool = False) -> None:
        """m <- (m + g) / 2 for `rows` (B,) and unit vectors g (B, dim) of all processes. A row that occurs more than
        once takes the mean of its vectors. `revocable`: until `keep`, `revoke` takes it back."""
        mine = (rows >= self.first) & (rows < self.end)
        # Repeated augmentation can bring an image several times in a batch.
        places, which = (rows[mine] - self.first).unique(return_inverse=True)
        sums = torch.zeros(len(places), self.dim, device=self.vectors.device).index_add_(
            0, which, vectors[mine].float()
        )
        means = sums / torch.bincount(which, minlength=len(places))[:, None]
        if revocable:
            self._before.append((places, self.vectors[places].clone()))
        averaged = (self.vectors[places].float() + means) / 2
        self.vectors[places] = (F.normalize(averaged, dim=1) if self.renormalise else averaged).to(self.vectors.dtype)

    def keep(self) -> None:
        """Make revocable updates final."""
        self._before.clear()

    def revoke(self) -> None:
        """Take back the updates that are not final, last first."""
        while self._before:
            places, vectors = self._before.pop()
            self.vectors[places] = vectors

    def loss(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """Eq. 2.3 of unit vectors (B, dim) of the images of `rows` (B,): one value per image, with the exact gradient.

        All processes call it with parts of one batch. The memory is constant. An image without another one of its
        class has no neighbour to come near to: its loss is 0, without gradient, and it stays a neighbour of others.
        """
        losses: Tensor = _NeighbourLoss.apply(vectors, rows, self)
        return losses

    def all_rows(self, rows: Tensor) -> Iterator[tuple[Tensor | slice, int, Tensor]]:
        """All rows that are here, in chunks: `class_rows` as if there were one class."""
        for start, vectors in self._chunks(self.first, self.end, len(rows)):
            yield slice(None), start, vectors

    def class_rows(self, rows: Tensor) -> Iterator[tuple[Tensor | slice, int, Tensor]]:
        """For each class of `rows` that has rows here, in chunks: places in `rows`, the first row of the chunk, and its
        unit vectors (C, dim)."""
        inner = torch.tensor(self.bounds[1:], device=rows.device)
        classes = torch.bucketize(rows, inner, right=True)
        for name in classes.unique().tolist():
            places = (classes == name).nonzero().flatten()
            first, end = max(self.bounds[name], self.first), min(self.bounds[name + 1], self.end)
            for start, vectors in self._chunks(first, end, len(places)):
                yield places, start, vectors

    def _chunks(self, first: int, end: int, queries: int) -> Iterator[tuple[int, Tensor]]:
        """The rows from `first` to `end`, as many at a time as scores with the queries take little memory: their first
        row, and unit vectors (C, dim) in float32."""
        size = max(1, _SCORES // max(1, queries))
        for start in range(first, end, size):
            yield start, self._unit(self.vectors[start - self.first : min(start + size, end) - self.first])

    def _unit(self, vectors: Tensor) -> Tensor:
        """As float32 unit vectors. Rows in half precision are normalised again: rounding changed their length."""
        wide = vectors if vectors.dtype == torch.float64 else vectors.float()
        return wide if self.renormalise and vectors.dtype == wide.dtype else F.normalize(wide, dim=1)


class _Sums:
    """Of B queries: the sum of exp(score) over rows, and of exp(score) times the row, both divided by exp(peak)."""

    def __init__(self, queries: Tensor) -> None:
        self.peak = queries.new_full((len(queries),), _LOWEST)
        self.total = queries.new_zeros(len(queries))
        self.weighted = torch.zeros_like(queries)

    def add(self, places: Tensor | slice, scores: Tensor, vectors: Tensor) -> None:
        """Further rows (C, dim) with their scores (b, C) for the queries at `places`; -inf leaves a row out."""
        peak = torch.maximum(self.peak[places], scores.amax(dim=1))
        # Relative to the largest score so far, exp cannot overflow; a larger one shrinks what is summed up already.
        shrink = (self.peak[places] - peak).exp_()
        weights = scores.sub_(peak[:, None]).exp_()
        self.total[places] = self.total[places] * shrink + weights.sum(dim=1)
        self.weighted[places] = self.weighted[places] * shrink[:, None] + weights @ vectors
        self.peak[places] = peak

    def over(self, processes: Processes) -> _Sums:
        """The sums over the rows of all processes."""
        if processes.count > 1:
            peak = processes.maximum(self.peak.clone())
            # The sums of each process are relative to its own peak: only at a common one can they be added.
            shrink = (self.peak - peak).exp_()
            both = torch.cat([self.total[:, None], self.weighted], dim=1) * shrink[:, None]
            both = processes.sum(both)
            self.peak, self.total, self.weighted = peak, both[:, 0], both[:, 1:]
        return self


class LossAndGradient(NamedTuple):
    """Of unit vectors z (B, dim): the loss of each (B,), and its derivative by z (B, dim)."""

    loss: Tensor
    gradient: Tensor


@torch.no_grad()
def loss_and_gradient(queries: Tensor, rows: Tensor, memory: Memory) -> LossAndGradient:
    """log sum_{j != i} exp(z_i m_j / s) - log sum_{j != i, y_j = y_i} exp(z_i m_j / s), in one pass over the memory: no
    matrix of all scores is kept. `queries` are those of all processes.

    The derivative of a logarithm of sums is their weighted mean of m / s, which is summed up on the way.
    """
    every, same = _Sums(queries), _Sums(queries)
    for sums, chunks in ((every, memory.all_rows(rows)), (same, memory.class_rows(rows))):
        for places, first, vectors in chunks:
            sums.add(places, _scores(queries[places], vectors, rows[places], first, memory.sigma), vectors)
    every, same = every.over(memory.processes), same.over(memory.processes)
    # A class of one image has no other row: 1 stands in for its sums, and `has` makes loss and gradient 0.
    has = same.total > 0
    one = torch.ones_like(same.total)
    own, all_ = torch.where(has, same.total, one), torch.where(has, every.total, one)
    loss = (all_.log() + every.peak - own.log() - same.peak).clamp_(min=0) * has  # rounding may give -1e-6
    gradient = (every.weighted / all_[:, None] - same.weighted / own[:, None]) * (has[:, None] / memory.sigma)
    return LossAndGradient(loss, gradient)


def _scores(queries: Tensor, vectors: Tensor, rows: Tensor, first: int, sigma: float) -> Tensor:
    """cos / sigma (B, C) with the rows from `first` on; -inf for a query's own row."""
    scores = (queries @ vectors.T).div_(sigma)
    own = rows - first
    (here,) = ((own >= 0) & (own < len(vectors))).nonzero(as_tuple=True)
    scores[here, own[here]] = -torch.inf
    return scores


class _NeighbourLoss(torch.autograd.Function):
    """The gradient is found with the loss, so that processes exchange everything in the forward pass."""

    @staticmethod
    def forward(context: Any, vectors: Tensor, rows: Tensor, memory: Memory) -> Tensor:
        # bf16 has 8 bits: scores of up to 1 / sigma would lose their differences.
        with torch.autocast(vectors.device.type, enabled=False):
            queries, everywhere = memory.processes.gather_rows(vectors.detach()), memory.processes.gather_rows(rows)
            found = loss_and_gradient(queries, everywhere, memory)
        # Shares of a batch may differ: those of this process come after those of all lower ranks.
        start = sum(memory.processes.gather(len(rows))[: memory.processes.rank])
        mine = slice(start, start + len(rows))
        context.save_for_backward(found.gradient[mine])
        return found.loss[mine]

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (by_vector,) = context.saved_tensors
        return gradients[0][:, None] * by_vector, None, None


def plain_neighbour_loss(vectors: Tensor, rows: Tensor, memory: Tensor, labels: Tensor, sigma: float = SIGMA) -> Tensor:
    """Eq. 2.2 and 2.3 as they are written, by autograd, with all scores in memory: what `Memory.loss` computes.

    Unit vectors (B, dim) of the images of `rows` (B,), a memory (N, dim) of unit vectors and `labels` (N,).
    """
    weights = (vectors @ memory.T / sigma).exp()
    others = torch.arange(len(memory), device=rows.device) != rows[:, None]
    p = weights * others / (weights * others).sum(dim=1, keepdim=True)
    same = labels[rows][:, None] == labels
    has = (same & others).any(dim=1)
    return torch.where(
        has, -(p * same).sum(dim=1).where(has, torch.ones_like(p[:, 0])).log(), torch.zeros_like(p[:, 0])
    )
