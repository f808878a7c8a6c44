"""The data of benchmarks/pretraining.py: crops of photos, draws of labels, and photos for pictures."""

from __future__ import annotations

import csv
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom import temporary
from patchloom.temporary import write_text

PHOTOS = 10  # classes
SIZE = 32  # pixels of a crop as the networks see it
_SIDE, _TILE = 40, 64  # pixels of a crop in its photo, and of a tile of the chessboard
_FLAT = 12.0  # standard deviation of the pixels below which a crop shows nothing, such as sky
_TRIES = 20  # per crop, before flat ones are taken
_EXPOSURE = (0.6, 1.4)  # range of the factors of brightness and contrast
Row = tuple[str, str, str]  # path, label, split


def crops(archive: Path, out: Path, train: int, val: int) -> Path:
    """A manifest of 32-pixel crops of ten COCO photos, whose class is the photo.

    A photo is a chessboard of tiles: training crops lie in the white ones and test crops in the black ones, so no pixel
    is in both. Each crop has an exposure of its own, so that pixels alone do not tell the photo.
    """

    def make(folder: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        draw, rows = np.random.default_rng(0), []
        for file in _spread(sorted((folder / "coco128" / "images" / "train").glob("*.jpg"))):
            for split, count in (("train", train), ("val", val)):
                for number, image in enumerate(_crops_of(file, split == "val", count, draw)):
                    path = Path(split) / file.stem / f"{number:04d}.png"
                    (folder / path.parent).mkdir(parents=True, exist_ok=True)
                    image.save(folder / path)
                    rows.append((path.as_posix(), file.stem, split))
        shutil.rmtree(folder / "coco128")
        _write(folder / "images.csv", rows)

    return once(out, make) / "images.csv"


def _spread(files: Sequence[Path]) -> Sequence[Path]:
    """Photos evenly over the archive, of those with enough tiles."""
    wide = []
    for file in files:
        with Image.open(file) as image:
            if min(image.size) >= 3 * _TILE:
                wide.append(file)
    return wide[:: max(1, len(wide) // PHOTOS)][:PHOTOS]


def _crops_of(file: Path, black: bool, count: int, draw: np.random.Generator) -> Iterable[Image.Image]:
    with Image.open(file) as opened:
        photo = opened.convert("RGB")
    rows, columns = photo.height // _TILE, photo.width // _TILE
    tiles = [(row, column) for row in range(rows) for column in range(columns) if (row + column) % 2 == black]
    found = tries = 0
    while found < count:
        row, column = tiles[draw.integers(len(tiles))]
        top, left = (int(edge * _TILE + draw.integers(0, _TILE - _SIDE + 1)) for edge in (row, column))
        crop = photo.crop((left, top, left + _SIDE, top + _SIDE)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        pixels = np.asarray(crop, dtype=np.float64)
        tries += 1
        if pixels.std() < _FLAT and tries < _TRIES * count:
            continue
        mean, contrast, brightness = pixels.mean(), draw.uniform(*_EXPOSURE), draw.uniform(*_EXPOSURE)
        exposed = ((pixels - mean) * contrast + mean) * brightness
        yield Image.fromarray(np.clip(exposed, 0, 255).astype(np.uint8))
        found += 1


def draw_labels(manifest: Path, per_class: int, draw: int) -> Path:
    """A manifest beside `manifest` with `per_class` of the training images of every class, and all test images."""
    with open(manifest, newline="") as handle:
        rows = [(row["path"], row["label"], row["split"]) for row in csv.DictReader(handle)]
    kept = [row for row in rows if row[2] != "train"]
    chooser = random.Random(draw)
    for label in sorted({row[1] for row in rows}):
        of_class = [row for row in rows if row[1:] == (label, "train")]
        kept += sorted(chooser.sample(of_class, min(per_class, len(of_class))))
    file = manifest.with_name(f"labels-{per_class}-{draw}.csv")
    _write(file, kept)  # the same in every call
    return file


def photos(archive: Path, out: Path) -> Path:
    """A folder of the training photos of pets."""

    def make(folder: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")

    return once(out, make) / archive.stem / "train"


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is made whole or not at all, also by two processes at the same time."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = temporary.aside(folder)
        with temporary.folder(beside):
            make(beside)
            try:
                os.rename(beside, folder)
            except OSError:  # the other process was first
                if not folder.exists():
                    raise
    return folder


def _write(file: Path, rows: Iterable[Row]) -> None:
    write_text(file, "".join(",".join(row) + "\n" for row in (("path", "label", "split"), *rows)))
