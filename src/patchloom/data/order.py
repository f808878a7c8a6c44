"""Which images are in which batch: a function of the step, so that a run can be cut anywhere and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from patchloom.data.randomness import torch_generator

Key = tuple[int, int, int]  # place of the image in the list of items, epoch, repeat


@dataclass(frozen=True)
class Order:
    """Which images are in which batch.

    With `repeats` r each image of the shuffled order comes r times in a row, differently augmented, and an epoch keeps
    its length: it sees about 1 / r of the images. Several processes take turns along a batch, so that the copies of an
    image meet in different processes, as published; in one process they meet in one batch. Any number of images works.
    """

    images: int
    batch: int
    repeats: int = 1
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; what is over is left to the next shuffling. Fewer images than a batch are one batch."""
        return max(1, self.images // self.batch)

    @property
    def images_per_step(self) -> int:
        """The size of a batch over all processes."""
        return min(self.batch, self.images)

    def epoch(self, epoch: int) -> list[Key]:
        """The keys (image, epoch, repeat) of an epoch in order; a function of (seed, epoch)."""
        shuffled = torch.randperm(self.images, generator=torch_generator(self.seed, epoch, "order")).tolist()
        # Copies of an image are neighbours: r processes that take turns get one each (repeated augmentation, as
        # published).
        keys = [(image, epoch, repeat) for image in shuffled for repeat in range(self.repeats)]
        return keys[: self.images]


class Steps(Sampler[list[Key]]):
    """The batches of one process, from step `start` on, to `end`.

    Args:
        start, end: steps of the run, counted over all epochs; `end` is not included.
        rank, processes: this process takes the keys rank, rank + processes, ... of each batch.
    """

    def __init__(self, order: Order, start: int, end: int, rank: int = 0, processes: int = 1) -> None:
        self.order, self.start, self.end = order, start, end
        self.rank, self.processes = rank, processes

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        per_epoch, size = self.order.steps_per_epoch, self.order.images_per_step
        keys: list[Key] = []
        for step in range(self.start, self.end):
            epoch, inside = divmod(step, per_epoch)
            # Also at a start in the middle of an epoch, where a resumed run begins.
            if not keys or inside == 0:
                keys = self.order.epoch(epoch)
            # Every process computes the whole batch and takes its share: no communication, and the same batch for any
            # number.
            yield keys[inside * size : (inside + 1) * size][self.rank :: self.processes]
