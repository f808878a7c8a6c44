"""What the tests of search share: a manifest of small pictures with two levels of labels, and a network for them."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from conftest import stir

FINE = {"rose": "flower", "tulip": "flower", "iris": "flower", "cod": "fish", "eel": "fish"}


@dataclass(frozen=True)
class World:
    """`table` lists every picture, with splits; `collection` the training pictures alone, as the split train."""

    root: Path
    table: Path
    collection: Path
    weights: Path
    train: list[dict[str, str]]
    test: list[dict[str, str]]

    def files(self, rows: list[dict[str, str]]) -> list[Path]:
        return [self.root / row["path"] for row in rows]

    def cosines(self, rows: list[dict[str, str]], items: list[dict[str, str]] | None = None) -> np.ndarray:
        """(rows, items) float64, by the network as it is loaded: no index, no fused copy."""
        model = patchloom.load(self.weights)
        one, all_ = (unit(model, self.files(some)) for some in (rows, items or self.train))
        return one @ all_.T


def unit(model: Any, files: list[Path]) -> np.ndarray:
    pictures = [
        np.asarray(Image.open(file).convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)) for file in files
    ]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (model.preprocessing.mean, model.preprocessing.std))
    x = (torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        return torch.nn.functional.normalize(model.embed(x).double(), dim=1).numpy()


def picture(label: int, generator: np.random.Generator) -> Image.Image:
    """Noise around a colour and a pattern of the class."""
    rows, columns = np.mgrid[0:32, 0:32]
    wave = np.sin((rows * (label + 1) + columns * (label % 2)) / 3)[..., None] * 40
    colour = np.random.default_rng(label).integers(60, 200, 3)
    pixels = colour + wave + generator.normal(0, 35, (32, 32, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_world(root: Path) -> World:
    generator, rows = np.random.default_rng(0), []
    for split, count in (("train", 14), ("test", 4)):
        for label, fine in enumerate(FINE):
            folder = root / split / fine
            folder.mkdir(parents=True)
            for i in range(count):
                picture(label, generator).save(folder / f"{i}.png")
                rows.append({"path": f"{split}/{fine}/{i}.png", "fine": fine, "coarse": FINE[fine], "split": split})
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    train.sort(key=lambda row: row["path"])
    table, collection = write_table(root / "table.csv", rows), write_table(root / "collection.csv", train)
    return World(root, table, collection, save_network(root / "model.safetensors"), train, test)


def save_network(path: Path, seed: int = 0, classes: tuple[str, ...] = ("fish", "flower")) -> Path:
    torch.manual_seed(seed)
    network = stir(patchloom.create_model("deit_nano", num_classes=len(classes), img_size=32, depth=1), 0.3)
    network.class_names = classes
    # the test crop is the whole picture, so that the oracle of the tests needs no crop
    network.preprocessing = patchloom.models.preprocessing.Preprocessing((32, 32), crop_ratio=1.0)
    patchloom.save(network, path)
    return path


def run(*words: Any, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchloom", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, done.stderr[-800:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an index, to the byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def built(world: World) -> Path:
    """An index of the training pictures, not to be changed."""
    out = world.root / "built"
    patchloom.Index.build(world.weights, world.collection, out, labels=["fine", "coarse"])
    return out


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """A copy of the index that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "index"))
