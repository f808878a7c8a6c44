"""Images to try: photos and digits that installed packages ship."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

_PHOTOS = (
    ("sklearn", "datasets/images/china.jpg", "Temple"),
    ("sklearn", "datasets/images/flower.jpg", "Flower"),
    ("skimage", "data/astronaut.png", "Astronaut"),
    ("skimage", "data/coffee.png", "Coffee"),
    ("skimage", "data/chelsea.png", "Cat"),
)
_DIGITS = 4


@dataclass(frozen=True)
class Sample:
    name: str
    label: str
    media_type: str
    data: bytes
    pixelated: bool = False


def find_samples() -> dict[str, Sample]:
    """By name; empty where no package has any. The packages are not imported."""
    return {sample.name: sample for sample in (*_photos(), *_digits())}


def _photos() -> Iterator[Sample]:
    for package, inside, label in _PHOTOS:
        path = _inside(package, inside)
        if path is not None:
            kind = "image/png" if path.suffix == ".png" else "image/jpeg"
            yield Sample(path.stem, label, kind, path.read_bytes())


def _digits() -> Iterator[Sample]:
    """The first images of scikit-learn's digits, 8 x 8 pixels of 0 to 16, as `patchloom train digits` reads them."""
    path = _inside("sklearn", "datasets/data/digits.csv.gz")
    if path is None:
        return
    with gzip.open(path, "rt") as file:
        for row, _ in zip(csv.reader(file), range(_DIGITS), strict=False):
            *pixels, label = (int(float(value)) for value in row)
            grey = (np.array(pixels).reshape(8, 8) * 255 / 16).round().astype(np.uint8)
            png = io.BytesIO()
            Image.fromarray(grey).save(png, "PNG")
            yield Sample(f"digit-{label}", f"Digit {label}", "image/png", png.getvalue(), pixelated=True)


def _inside(package: str, path: str) -> Path | None:
    spec = find_spec(package)
    places = [Path(place) / path for place in (spec.submodule_search_locations or ())] if spec else []
    return next((place for place in places if place.is_file()), None)
