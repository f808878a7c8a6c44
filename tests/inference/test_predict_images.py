"""Prediction on images that are given in Python: the same as on their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.data.images import to_batch
from patchloom.errors import PatchloomError


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return patchloom.create_model("deit_tiny", img_size=32, patch_size=16, depth=1, num_classes=4).eval()


def test_files_images_arrays_tensors_and_datasets_give_the_same(network: Any, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "x.png")
    (want,) = patchloom.predict(network, tmp_path / "x.png")
    assert want["path"] == str(tmp_path / "x.png")
    tensor = to_batch([image], network.preprocessing)[0]
    for images in (image, pixels, [image], (pixels,), pixels[None], tensor, [(image, 3)]):
        (row,) = patchloom.predict(network, images)
        assert row == {"path": None, "predictions": want["predictions"]}
    rows = patchloom.predict(network, [tmp_path / "x.png", image, 7], batch=2)
    assert [row["path"] for row in rows] == [str(tmp_path / "x.png"), None, None]
    assert "not int" in rows[2]["error"]
    with pytest.raises(PatchloomError, match="not int"):
        patchloom.predict(network, 7)


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    return patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=1)


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (20, 24, 3), np.uint8))


def test_a_network_of_the_caller_keeps_its_mode(small: Any) -> None:
    small.train()
    small.blocks[0].eval()
    labelled = [(noise(i), i % 3) for i in range(12)]
    patchloom.predict(small, noise(0))
    patchloom.embed(small, noise(0))
    with pytest.warns(UserWarning, match="indices"):
        patchloom.evaluate(small, labelled, split="all")
    assert small.training
    assert small.head.training
    assert not small.blocks[0].training


def test_images_and_tensors_of_several_sizes_in_one_call(small: Any) -> None:
    given = [noise(0), torch.randn(3, 16, 16), np.asarray(noise(1)), torch.randn(3, 32, 32), torch.randn(3, 16, 16)]
    rows = patchloom.predict(small, given)
    for row, one in zip(rows, given, strict=True):
        want = {each["class"]: each["probability"] for each in patchloom.predict(small, one)[0]["predictions"]}
        assert {each["class"]: each["probability"] for each in row["predictions"]} == pytest.approx(want, abs=1e-6)
    alone = np.concatenate([patchloom.embed(small, one) for one in given])
    assert np.allclose(patchloom.embed(small, given), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (noise(0), {"batch": 0}, "batch must be at least 1, not 0"),
        (noise(0), {"top": "3"}, "top must be a whole number of at least 1, not '3'"),
        (noise(0), {"top": 0}, "top must be a whole number of at least 1, not 0"),
        ({"one": noise(0)}, {}, "not dict"),
    ],
)
def test_wrong_arguments(inputs: Any, options: dict[str, Any], message: str, small: Any) -> None:
    with pytest.raises(PatchloomError, match=message):
        patchloom.predict(small, inputs, **options)
    if "top" not in options:
        with pytest.raises(PatchloomError, match=message):
            patchloom.embed(small, inputs, **options)
