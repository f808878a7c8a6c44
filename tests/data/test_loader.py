"""Samples and batches: the same whatever the workers; any structure, several views and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.collating import collate
from patchloom.data.images import Picture, as_image, resize_and_crop
from patchloom.data.loader import EvalImages, Samples, eval_batches
from patchloom.data.opening import open_source
from patchloom.data.order import Order, Steps
from patchloom.data.randomness import sample_seed, seed_of, view_seed
from patchloom.data.sources import Item, Source
from patchloom.data.transforms import Augment, OneView, Views
from patchloom.data.workers import load_batches
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing

AUGMENT = Augment(augmentation="rand", color_jitter=0.2)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(workers: int) -> None:
    source = open_source("digits")
    items, order = source.splits["train"][:40], Order(40, 16, 3, seed=2)

    def batches(start: int, count: int):
        images = Samples(source, items, OneView(AUGMENT, (16, 16)), seed=2)
        return list(load_batches(images, Steps(order, start, 6), count))

    state = torch.get_rng_state()
    plain, other = batches(0, 0), batches(2, workers)
    assert torch.equal(torch.get_rng_state(), state)
    for (a, la), (b, lb) in zip(plain[2:], other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(la, lb)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_may_make_any_structure_of_an_image(workers: int) -> None:
    source = open_source("digits")
    items = source.splits["val"][:6]

    def transform(picture: Picture, item: Item, seed: int) -> dict[str, Any]:
        pixels = np.asarray(as_image(picture))
        return {"views": (pixels, (pixels[:4], item.label)), "key": item.key, "seed": seed, "mask": None}

    samples = Samples(source, items, transform, seed=5)
    (first, second) = load_batches(samples, [[(0, 2, 0), (3, 2, 1)], [5]], workers)
    assert first["views"][0].shape == (2, 8, 8, 3)
    assert first["views"][1][0].shape == (2, 4, 8, 3)
    assert first["views"][1][1].tolist() == [items[0].label, items[3].label]
    assert (first["key"], first["mask"]) == ([items[0].key, items[3].key], None)
    assert first["seed"].tolist() == [sample_seed(5, 2, 0, 0), sample_seed(5, 2, 3, 1)]
    assert second["seed"].tolist() == [sample_seed(5, 0, 5)]


def test_views_are_drawn_independently_and_the_first_is_that_of_one_view() -> None:
    source = open_source("digits")
    items = source.splits["val"][:5]
    small = Augment(crop="src", augmentation="three")
    views = Views(((AUGMENT, (16, 16)), (AUGMENT, (16, 16)), (small, (8, 8))))
    (one, two, three), target = Samples(source, items, views, seed=1)[(3, 4, 0)]
    image, label = Samples(source, items, OneView(AUGMENT, (16, 16)), seed=1)[(3, 4, 0)]
    assert np.array_equal(one, image)
    assert target == label == items[3].label
    assert not np.array_equal(one, two)
    seed = seed_of(1, 4, 3, 0, "image")
    assert np.array_equal(two, AUGMENT(source.picture(items[3]), (16, 16), view_seed(seed, 1)))
    assert np.array_equal(three, small(source.picture(items[3]), (8, 8), view_seed(seed, 2)))
    assert len({view_seed(seed, view) for view in range(100)}) == 100


def test_evaluation_sees_the_centre_crop_and_targets_without_classes() -> None:
    source, how = open_source("digits"), Preprocessing((8, 12), crop_ratio=0.9)
    items = source.splits["val"]
    batches = list(eval_batches(source, [7, 3, 5], items, how, 2, 0))
    assert [len(labels) for _, labels in batches] == [2, 1]
    want = [np.asarray(resize_and_crop(source.read(items[place]), how)) for place in (7, 3, 5)]
    assert np.array_equal(torch.cat([images for images, _ in batches]).numpy(), np.stack(want))
    assert torch.cat([labels for _, labels in batches]).tolist() == [items[place].label for place in (7, 3, 5)]

    class Bare(Source):
        def read(self, item: Item) -> Image.Image:
            return Image.new("RGB", (9, 9))

    bare = Bare("bare", (), {"all": [Item("0"), Item("1", "a text")]})
    assert EvalImages(bare, bare.items(), how)[1][1] == "a text"
    assert next(eval_batches(bare, [0], bare.items(), how, 1, 0))[1] is None


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_stacked_is_one_message(workers: int) -> None:
    source = open_source("digits")
    items = source.splits["val"][:4]
    sizes = Samples(source, items, lambda picture, item, seed: np.zeros((1 + int(item.key) % 97, 2)))
    with pytest.raises(PatchloomError, match=r"shapes \(.* cannot be stacked .* `collate`"):
        list(load_batches(sizes, [[0, 1, 2, 3]], workers))
    lists = load_batches(sizes, [[0, 1, 2, 3]], workers, collate=list)
    assert len(next(lists)) == 4


def test_collate() -> None:
    assert collate([1, 2]).dtype == torch.int64
    assert collate([0.5, 1.5]).tolist() == [0.5, 1.5]
    assert collate([np.float32(1), np.float32(2)]).tolist() == [1, 2]
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([None, None]) is None
    assert collate([None, 3]) == [None, 3]
    assert torch.equal(collate([torch.ones(2), torch.zeros(2)]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert collate([[1, 2], [3, 4]])[0].tolist() == [1, 3]
    with pytest.raises(PatchloomError, match=r"\[1, 2\] parts"):
        collate([[1], [1, 2]])


def test_collate_of_numpy_values_and_of_tensors_with_a_gradient() -> None:
    assert collate([np.bool_(True), np.bool_(False)]).tolist() == [True, False]
    assert collate([1, torch.tensor(2)]).tolist() == [1, 2]
    texts = [np.array(["a", "b"]), np.array(["c"])]
    assert collate(texts) == texts
    assert not collate([torch.ones(2, requires_grad=True) * 2]).requires_grad


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"a": 1, "b": 2}, {"a": 1}], r"keys \['a', 'b'\], \['a'\]"),
        ([1, "a"], "types int and str"),
        ([{"a": 1}, 3], "types dict and int"),
        ([torch.ones(2), None], "types Tensor and NoneType"),
        ([(1, 2), 3], "types tuple and int"),
        ([2**70, 1], "cannot be put into a tensor"),
        ([1, np.ones(3)], "cannot be put into a tensor"),
    ],
)
def test_samples_of_different_structures_are_one_message(samples: list[Any], message: str) -> None:
    with pytest.raises(PatchloomError, match=message):
        collate(samples)
