"""Samples for a module of the user's own: from a dataset of any kind, or from images of any source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


PIXELS, TENSORS, TARGETS = "pixels", "tensors", "targets"  # the parts of a sample, and of a batch


class OwnSamples(Dataset[dict[str, Any]]):
    """Input and target by key: tensors of the dataset as they are, an image augmented, or cropped as in evaluation.

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

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """The sample of the key (place, epoch, repeat); the augmentation is a function of it and of the seed.

        {"tensors", "targets"}, or of an image {"pixels", "targets"}: an array (height, width, channels) of pixel values
        that are normalised on the device, in batches. The two have names, since both may be of uint8.
        """
        place, epoch, repeat = key
        # `place` counts the training samples, `index` the entries of the whole dataset.
        index = self.indices[place]
        with errors_in(f"Entry {index} of the dataset"):
            entry = self.dataset[index]
        value, target = _pair(entry, index)
        made = value if _are_tensors(value) else self._prepare(value, index, epoch, repeat)
        return {TENSORS if _are_tensors(made) else PIXELS: made, TARGETS: target}

    def _prepare(self, value: Any, index: int, epoch: int, repeat: int) -> Any:
        """An image as pixels; an own augmentation may return a tensor."""
        picture = as_picture(value)
        if self.augment is None:
            return crop(picture, self.preprocessing)
        return self.augment(picture, self.preprocessing.img_size, sample_seed(self.seed, epoch, index, repeat))


def _are_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a dict, tuple or list of tensors."""
    if isinstance(value, Mapping | tuple | list):
        parts = list(value.values()) if isinstance(value, Mapping) else value
        return bool(parts) and all(map(_are_tensors, parts))
    return isinstance(value, Tensor)


def _pair(entry: Any, index: int) -> tuple[Any, Any]:
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return entry[0], entry[1]
    raise PatchloomError(
        f"Entry {index} of the dataset is {type(entry).__name__}; expected a pair (input, target). The input is a "
        "tensor, a dict or tuple of tensors, or an image (PIL, array or path), the target whatever the loss takes."
    )
