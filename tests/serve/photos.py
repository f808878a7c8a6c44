"""What the tests of search over HTTP share: photos with two levels of labels, and a network for them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import torch

import patchloom
from conftest import stir
from serving import picture

SPECIES = {"siamese": "cat", "persian": "cat", "pug": "dog", "beagle": "dog"}


def make_photos(root: Path) -> Path:
    """A manifest of 40 pictures, the first of them 900 x 600 pixels, with breed and species."""
    rows = ["path,breed,species"]
    for number, breed in enumerate(SPECIES):
        (root / breed).mkdir(parents=True)
        for i in range(10):
            name = f"{breed}/{i} é&?.png" if i == 1 else f"{breed}/{i}.png"
            size = (900, 600) if number == i == 0 else (40, 30)
            (root / name).write_bytes(picture(100 * number + i, size))
            rows.append(f"{name},{breed},{SPECIES[breed]}")
    (root / "photos.csv").write_text("\n".join(rows) + "\n")
    return root / "photos.csv"


def save_model(path: Path, seed: int = 0, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    torch.manual_seed(seed)
    model = stir(patchloom.create_model("deit_nano", num_classes=len(classes), img_size=32, depth=1), 0.3)
    model.class_names = classes
    patchloom.save(model, path)
    return path


def keyed(path: str, key: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}key={quote(key, safe='')}"
