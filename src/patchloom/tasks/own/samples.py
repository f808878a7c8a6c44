"""Samples for a module of the user's own: from a dataset of any kind, or from images of any source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.data.images import as_picture, crop
from patchloom.data.order import Key
from patchloom.data.randomness import sample_seed
from patchloom.data.sources import Item, Source
from patchloom.data.transforms import Augmentation
from patchloom.errors import PatchloomError, errors_in
from patchloom.models.preprocessing import Preprocessing


class SourceData(Dataset[tuple[Any, int]]):
    """The images of a source as (picture, label)."""

    def __init__(self, source: Source, items: Sequence[Item]) -> None:
        self.source, self.items = source, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self.items[index]
        return self.source.read(item), item.label


class OwnSamples(Dataset[tuple[Any, Any]]):
    """(input, target) by key: a tensor of the dataset as it is, an image augmented, or cropped as in evaluation.

    `indices` are those of the dataset that belong to these samples; without `augment` images are only cropped.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Sequence[int],
        preprocessing: Preprocessing,
        augment: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.dataset, self.indices, self.preprocessing = dataset, indices, preprocessing
        self.augment, self.seed = augment, seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> tuple[np.ndarray | Tensor, Any]:
        """(input, target) of the key (place, epoch, repeat); the augmentation is a function of it and of the seed.

        Images are arrays (height, width, channels) of pixel values: they are normalised on the device, in batches.
        """
        place, epoch, repeat = key
        # `place` counts the training samples, `index` the entries of the whole dataset.
        index = self.indices[place]
        with errors_in(f"Entry {index} of the dataset"):
            entry = self.dataset[index]
        value, target = _pair(entry, index)
        picture = value if isinstance(value, Tensor) else as_picture(value)
        # A tensor is the user's own input, such as a spectrogram: it is neither cropped nor normalised.
        if isinstance(picture, Tensor):
            return picture, target
        if self.augment is None:
            return crop(picture, self.preprocessing), target
        seed = sample_seed(self.seed, epoch, index, repeat)
        return self.augment(picture, self.preprocessing.img_size, seed), target


def _pair(entry: Any, index: int) -> tuple[Any, Any]:
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return entry[0], entry[1]
    raise PatchloomError(
        f"Entry {index} of the dataset is {type(entry).__name__}; expected a pair (input, target). The input is a "
        "tensor or an image (PIL, array or path), the target whatever the loss takes."
    )
