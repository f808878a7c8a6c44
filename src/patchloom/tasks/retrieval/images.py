"""The images of a Grafit run: their labels of one column, none, or the clusters of another network's vectors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source
from patchloom.tasks.opened import Opened
from patchloom.tasks.retrieval.config import RetrievalConfig


def open_labelled(config: RetrievalConfig, opened: Opened, keep: bool = False) -> Source:
    """The source of a run, with the labels of its column or without any; a plan keeps it for the task."""
    open_with = opened.keep if keep else opened.take
    if config.labelled:
        return open_with(open_source, config.data, config.labels)
    return unlabelled(open_with(open_source, config.data, None, targets="none"))


def unlabelled(source: Source) -> Source:
    """A copy whose images have no labels."""
    plain = copy.copy(source)
    plain.class_names, plain.columns = (), {}
    plain.splits = {
        name: [dataclasses.replace(item, target=None) for item in items] for name, items in source.splits.items()
    }
    return plain


def label_column(config: RetrievalConfig, source: Source) -> str | None:
    """The column that a run is trained on; None without labels and for clusters."""
    if not config.labelled or config.clusters_from is not None:
        return None
    return config.labels or next(iter(source.columns), None)


def labels_of(items: list[Item]) -> Tensor:
    """The class of each image (N,); without labels all are of one class."""
    return torch.tensor([0 if item.target is None else item.label for item in items], dtype=torch.long)


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A transform for `Samples`: the views of an image, and the number of the image among those trained on."""

    views: Any  # a `Views` transform
    places: Mapping[str, int]  # by key

    def __call__(self, picture: Any, item: Item, seed: int) -> tuple[tuple[Any, ...], int]:
        images, _ = self.views(picture, item, seed)
        return images, self.places[item.key]
