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
