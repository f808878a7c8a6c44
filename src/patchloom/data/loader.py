"""Samples of a source: what a task makes of one image, drawn from the seed of that image, epoch and repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.data.images import Picture, crop
from patchloom.data.order import Key
from patchloom.data.randomness import sample_seed
from patchloom.data.sources import Item, Source
from patchloom.data.workers import Batches, load_batches
from patchloom.models.preprocessing import Preprocessing

Transform = Callable[[Picture, Item, int], Any]  # picture, item, seed -> a sample of any structure


class Samples(Dataset[Any]):
    """`transform(picture, item, seed)` of the items of a source, by key.

    A key is (place in `items`, epoch, repeat), or a place alone. The seed depends on the key and on `seed` only. With
    `fast`, JPEG photos are decoded at a reduced size where that is enough: see `Source.picture`.
    """

    def __init__(
        self, source: Source, items: Sequence[Item], transform: Transform, seed: int = 0, *, fast: bool = False
    ) -> None:
        self.source, self.items, self.transform, self.seed, self.fast = source, items, transform, seed, fast

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Key | int) -> Any:
        """The sample of a key: what `transform` makes of the picture, with a seed of its own."""
        image, epoch, repeat = (key, 0, 0) if isinstance(key, int) else key
        item = self.items[image]
        picture = self.source.picture(item, fast=self.fast)
        return self.transform(picture, item, sample_seed(self.seed, epoch, image, repeat))


class EvalImages(Dataset[tuple[np.ndarray | Tensor, Any]]):
    """Images as evaluation sees them, (height, width, 3) uint8, with their labels, by place in `items`.

    Images of a source without classes come with their targets.
    """

    def __init__(self, source: Source, items: Sequence[Item], preprocessing: Preprocessing) -> None:
        self.source, self.items, self.preprocessing = source, items, preprocessing

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> tuple[np.ndarray | Tensor, Any]:
        item = self.items[place]
        target = item.label if self.source.labelled else item.target
        return crop(self.source.picture(item), self.preprocessing), target


def eval_batches(
    source: Source,
    places: Sequence[int],
    items: Sequence[Item],
    preprocessing: Preprocessing,
    batch: int,
    workers: int,
    pin: bool = False,
) -> Batches:
    """Images (B, height, width, 3) uint8 and labels (B,) of the items at `places`, in this order, each once."""
    batches = [list(places[i : i + batch]) for i in range(0, len(places), batch)]
    return load_batches(EvalImages(source, items, preprocessing), batches, workers, pin=pin)
