"""A user's own datasets and augmentations: every kind of image, the split, and mistakes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.loader import Samples, eval_batches
from patchloom.data.opening import open_source
from patchloom.data.own import OwnAugment
from patchloom.data.splits import split_source
from patchloom.data.transforms import Augment, OneView
from patchloom.data.workers import load_batches
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing

SIZE = Preprocessing((8, 8), crop_ratio=1.0)


class Own:
    """Map-style, without a base class."""

    def __init__(self, entries: list[Any], classes: list[str] | None = None) -> None:
        self.entries = entries
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Any:
        return self.entries[index]


def pixels(seed: int = 0, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def test_images_of_every_kind(tmp_path: Path) -> None:
    Image.fromarray(pixels(2)).save(tmp_path / "2.png")
    dataset = Own(
        [(Image.fromarray(pixels(0)), 0), (pixels(1), 2), [tmp_path / "2.png", 1], (str(tmp_path / "2.png"), 1)]
    )
    source = open_source(dataset)
    assert source.class_names == ("0", "1", "2")
    assert [item.label for item in source.items()] == [0, 2, 1, 1]
    images, labels = next(eval_batches(source, range(4), source.items(), SIZE, 4, 0))
    assert np.array_equal(images.numpy(), np.stack([pixels(0), pixels(1), pixels(2), pixels(2)]))
    assert labels.tolist() == [0, 2, 1, 1]
    assert open_source(source) is source


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_are_used_as_they_are(workers: int) -> None:
    tensors = torch.randn(6, 2, 5, 7)
    source = open_source(Own([(tensor, i % 2) for i, tensor in enumerate(tensors)]))
    images, _ = next(eval_batches(source, range(6), source.items(), SIZE, 6, 0))
    assert torch.equal(images, tensors)
    samples = Samples(source, source.items(), OneView(Augment(augmentation="rand"), (8, 8)))
    images, labels = next(load_batches(samples, [[(1, 0, 0), (4, 0, 0)]], workers))
    assert torch.equal(images, tensors[[1, 4]])
    assert labels.tolist() == [1, 0]
    with pytest.raises(PatchloomError, match=r"all/0 .* is a tensor"):
        source.read(source.items()[0])


def test_names_of_classes_and_the_fingerprint() -> None:
    entries = [(pixels(), i % 2) for i in range(10)]
    named = open_source(Own(entries, ["ant", "bee", "cow"]))
    assert named.class_names == ("ant", "bee", "cow")
    assert named.fingerprint() == open_source(Own(entries, ["ant", "bee", "cow"])).fingerprint()
    assert named.fingerprint() != open_source(Own(entries)).fingerprint()
    assert named.fingerprint() != open_source(Own(entries[:9], ["ant", "bee", "cow"])).fingerprint()
    with pytest.raises(PatchloomError, match="a target 1, but `classes` has 1 names"):
        open_source(Own(entries, ["ant"]))


def test_the_split_is_a_fifth_of_each_class_or_a_second_dataset() -> None:
    entries = [(pixels(), i % 2) for i in range(20)]
    split = split_source(open_source(Own(entries)))
    assert [sum(item.label == label for item in split.held_out) for label in (0, 1)] == [2, 2]
    assert split == split_source(open_source(Own(entries)))
    own = split_source(open_source(Own(entries), validation=Own([(pixels(7), 1)])))
    assert [item.key for item in own.held_out] == ["val/0"]
    assert len(own.train) == 20


def test_targets_are_listed_once_where_the_dataset_has_them() -> None:
    class Listed(Own):
        targets = (1, 0)

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("no image is read to list the targets")

    assert [item.label for item in open_source(Listed([0, 0])).items()] == [1, 0]


def test_images_alone() -> None:
    dataset = Own([pixels(i) for i in range(10)])
    with pytest.raises(PatchloomError, match="Target 0 of the dataset Own is missing"):
        open_source(dataset)
    source = open_source(dataset, targets="none")
    assert (source.class_names, source.items()[3].target) == ((), None)
    assert len(split_source(source).held_out) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (7, "not int"),
        ({"a": 1}, "not dict"),
        (Own([]), "is empty"),
        (Own([(pixels(), 0), (pixels(), "cat")]), "Target 1 of the dataset Own is of type str"),
        (Own([(pixels(), 0.5)]), "Target 0 .* of type float"),
        (Own([(pixels(), -1)]), "Target 0 .* is -1"),
        (Own([(pixels(), 1, 2)]), "Entry 0 .* has 3 parts"),
        (Own([(pixels(), 10**9)]), "a target 1000000000, .* number the classes from 0 on"),
    ],
)
def test_wrong_data_is_named(data: Any, reason: str) -> None:
    with pytest.raises(PatchloomError, match=reason):
        open_source(data)


@pytest.mark.parametrize("image", [object(), 3, None, np.zeros((4, 4)), torch.zeros(4, 4)])
def test_a_wrong_image_is_named_with_its_index(image: Any) -> None:
    source = open_source(Own([(pixels(), 0), (image, 1)]))
    with pytest.raises(PatchloomError, match="Image 1 of dataset Own"):
        list(eval_batches(source, range(2), source.items(), SIZE, 2, 0))


def test_a_second_dataset_is_for_a_dataset_of_ones_own() -> None:
    with pytest.raises(PatchloomError, match="validation dataset"):
        open_source("digits", validation=Own([(pixels(), 0)]))
    with pytest.raises(PatchloomError, match="has not"):
        open_source(Own([(pixels(), 0)]), validation=3)
    with pytest.raises(PatchloomError, match="label columns"):
        open_source(Own([(pixels(), 0)]), labels="genus")


def test_own_augmentations_are_seeded_by_the_sample() -> None:
    def noisy(image: Image.Image) -> np.ndarray:
        noise = np.array([random.randrange(100), np.random.randint(100), int(torch.randint(100, ()))], np.uint8)
        return np.asarray(image.resize((8, 8))) // 2 + noise

    augment, before = OwnAugment(noisy), torch.get_rng_state()
    image = Image.fromarray(pixels(size=20))
    first, again, other = (augment(image, (8, 8), seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert all((first != other).any(axis=(0, 1)))  # each of the three generators
    assert torch.equal(torch.get_rng_state(), before)
    tensor = torch.randn(3, 4, 4)
    assert OwnAugment(lambda _: tensor)(image, (8, 8), 0) is tensor
    with pytest.raises(PatchloomError, match="20 x 20 pixels; the network takes 8 x 8"):
        OwnAugment(lambda image: image)(image, (8, 8), 0)
    with pytest.raises(PatchloomError, match=r"augmentation returns .* not int"):
        OwnAugment(lambda image: 3)(image, (8, 8), 0)
