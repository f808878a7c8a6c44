"""Real weights on real photos of pets, whose outlines are known: maps lie on the animal more than chance would."""

from __future__ import annotations

import dataclasses
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

import patchloom
from patchloom.data.images import resize_and_crop

PHOTOS = 16


def test_grad_cam_of_deit_lies_on_the_pet(shared: Path, tmp_path: Path) -> None:
    """74 % of its mass and 81 % of its maxima in 200 photos, against 45 % of the pixels (docs/results/pointing.md)."""
    with tarfile.open(shared / "data" / "pets128.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    pets = tmp_path / "pets128"
    network = patchloom.load(shared / "weights" / "deit_tiny_patch16_224_in1k_fp16.safetensors")
    paths = sorted((pets / "val").rglob("*.jpg"))
    rows = []
    for path in paths[:: len(paths) // PHOTOS]:
        values = patchloom.explain(network, path, maps=["grad-cam"], faithfulness=False).maps["grad-cam"]
        trimap = Image.open(pets / "trimaps" / path.relative_to(pets).with_suffix(".png"))
        how = dataclasses.replace(network.preprocessing, interpolation="nearest")
        pet = np.asarray(resize_and_crop(trimap, how)) == 1
        rows.append((values[pet].sum() / values.sum(), pet.ravel()[values.argmax()], pet.mean()))
    mass, hits, area = np.mean(rows, axis=0)
    assert mass > area + 0.15
    assert hits > area + 0.15
