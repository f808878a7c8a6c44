"""A user's own dataset and augmentation, given in Python.

A dataset is anything with `__len__` and `__getitem__` that gives (image, target) or an image. An image is a PIL image,
an array (height, width, 3) of uint8, a path, or a tensor (C, height, width). A tensor is used as it is: no resizing, no
augmentation, no normalisation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from patchloom.data.images import Picture, as_image, as_picture
from patchloom.data.randomness import seeded_globals
from patchloom.data.sources import Item, Source
from patchloom.data.transforms import Size
from patchloom.errors import PatchloomError, errors_in
from patchloom.models.class_names import MOST_CLASSES, check_distinct


class TensorImage(PatchloomError):
    """A tensor of a user's own dataset, where a picture to show or to compare is asked for."""


class OwnSource(Source):
    """The images of datasets that live in memory: the key of an image is "split/index"."""

    def __init__(self, datasets: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.datasets = datasets

    def picture(self, item: Item, fast: bool = False) -> Picture:  # noqa: ARG002 - decoded, if at all, by the dataset
        """The image at the item's index: a PIL image, or the dataset's own tensor."""
        split, _, index = item.key.rpartition("/")
        image, _ = _entry(self.datasets[split], int(index))
        try:
            return as_picture(image)
        except PatchloomError as error:
            raise PatchloomError(f"Image {index} of {self.where}: {error}") from error

    def read(self, item: Item) -> Image.Image:
        picture = self.picture(item)
        if isinstance(picture, Tensor):
            raise TensorImage(
                f"Image {item.key} of {self.where} is a tensor, which is used as it is; here an image is needed that "
                "can be shown: a PIL image, an array (H, W, 3) of uint8 or a path."
            )
        return as_image(picture)

    def fingerprint(self) -> str:
        """From the lengths and the class names: to read all images only to compare them would take too long."""
        lengths = {split: len(items) for split, items in self.splits.items()}
        return hashlib.sha256(json.dumps([lengths, self.class_names]).encode()).hexdigest()


def is_dataset(value: Any) -> bool:
    """Whether a value is a map-style dataset."""
    # An iterable-style one inherits a `__getitem__` that only raises.
    other = isinstance(value, (str, bytes, dict, IterableDataset))
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not other


def open_own(dataset: Any, validation: Any = None, targets: str = "class", num_classes: int | None = None) -> OwnSource:
    """The source of a user's own dataset, with a second one to hold out, if given.

    Integer targets are classes; their names are `dataset.classes`, or "0", "1", ... for `num_classes` classes, by
    default up to the largest target. With targets "none", a dataset may give images alone. Wrong types are a
    `PatchloomError` with index and type.
    """
    where = f"dataset {type(dataset).__name__}"
    datasets = {"all": dataset} if validation is None else {"train": dataset, "val": validation}
    for split, given in datasets.items():
        if not is_dataset(given):
            raise PatchloomError(f"A dataset has __len__ and __getitem__; {type(given).__name__} ({split}) has not.")
        if not len(given):
            raise PatchloomError(f"The {where} ({split}) is empty.")
    found = {split: _targets(given, where, targets) for split, given in datasets.items()}
    # One image without a class makes all of them unlabelled: a split must not depend on which.
    labelled = all(target is not None for column in found.values() for target in column)
    if not labelled:
        found = {split: [None] * len(column) for split, column in found.items()}
    class_names = _class_names(dataset, where, found, num_classes) if labelled else ()
    splits = {
        split: [Item(f"{split}/{index}", target) for index, target in enumerate(column)]
        for split, column in found.items()
    }
    return OwnSource(datasets, where, class_names, splits)


def _targets(dataset: Any, where: str, targets: str) -> list[int | None]:
    """The class of each image. `dataset.targets`, as the sets of torchvision have it, saves reading every image."""
    listed: Any = getattr(dataset, "targets", None)
    if hasattr(listed, "__getitem__") and hasattr(listed, "__len__") and len(listed) == len(dataset):
        return [_checked(listed[index], index, where, targets) for index in range(len(dataset))]
    return [_checked(_entry(dataset, index)[1], index, where, targets) for index in range(len(dataset))]


def _entry(dataset: Any, index: int) -> tuple[Any, Any]:
    """Image and target, which is None where the dataset gives images alone."""
    with errors_in(f"Entry {index} of the dataset {type(dataset).__name__}"):
        entry = dataset[index]
    if not isinstance(entry, (tuple, list)):
        return entry, None
    if len(entry) != 2:
        raise PatchloomError(
            f"Entry {index} of the dataset {type(dataset).__name__} has {len(entry)} parts; expected (image, target) "
            "or an image."
        )
    return entry[0], entry[1]


def _checked(target: Any, index: int, where: str, targets: str) -> int | None:
    if isinstance(target, (Tensor, np.ndarray)) and target.ndim == 0:
        target = target.item()
    # bool is an int in Python, but True is hardly the class 1.
    if isinstance(target, (int, np.integer)) and not isinstance(target, bool):
        if target < 0:
            raise PatchloomError(f"Target {index} of the {where} is {target}; a class is 0 or more.")
        return int(target)
    if targets == "none":
        return None
    what = "missing" if target is None else f"of type {type(target).__name__}"
    raise PatchloomError(f"Target {index} of the {where} is {what}; a class is an integer from 0 on.")


def _class_names(dataset: Any, where: str, found: dict[str, list[Any]], count: int | None) -> tuple[str, ...]:
    largest = max(target for column in found.values() for target in column)
    names: Any = getattr(dataset, "classes", None)
    if names is None:
        if count is not None and largest >= count:
            raise PatchloomError(f"The {where} has a target {largest}, but the model has {count} classes.")
        if largest >= MOST_CLASSES:  # an identifier, most likely; names for so many classes would fill the memory
            raise PatchloomError(
                f"The {where} has a target {largest}, so that the model would have {largest + 1} classes: number the "
                "classes from 0 on."
            )
        return tuple(map(str, range(count or largest + 1)))
    if not isinstance(names, Iterable):
        raise PatchloomError(f"`classes` of the {where} has the names of the classes, not {names!r}.")
    class_names = check_distinct([str(name) for name in names], f"The {where}")
    if largest >= len(class_names):
        raise PatchloomError(f"The {where} has a target {largest}, but `classes` has {len(class_names)} names.")
    return class_names


@dataclass(frozen=True)
class OwnAugment:
    """A user's own augmentation, in the place of `transforms.Augment`: a function from a PIL image to a PIL image, an
    array (height, width, 3) of uint8, both of the size that the network takes, or a tensor (C, height, width).

    It may draw from the global generators of `random`, numpy and torch: they are seeded for each image.
    """

    function: Callable[[Image.Image], Any]

    def __call__(self, picture: Picture, size: Size, seed: int) -> np.ndarray | Tensor:
        if isinstance(picture, Tensor):
            return picture
        # Augmentations of other libraries draw from global generators, and would otherwise differ from run to run.
        with seeded_globals(seed), errors_in("The augmentation"):
            made = self.function(as_image(picture))
        # as_picture would take a text for the path of an image.
        if isinstance(made, str):
            raise PatchloomError("The augmentation returns a str; expected a PIL image, an array or a tensor.")
        try:
            given = as_picture(made)
        except PatchloomError as error:
            raise PatchloomError(f"The augmentation returns no usable image. {error}") from error
        if isinstance(given, Tensor):
            return given
        pixels = np.asarray(given)
        if pixels.shape[:2] != tuple(size):
            raise PatchloomError(
                f"The augmentation returns an image of {pixels.shape[0]} x {pixels.shape[1]} pixels; the network takes "
                f"{size[0]} x {size[1]}. Resize or crop it to this size in the augmentation."
            )
        return pixels
