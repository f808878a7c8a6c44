"""The picture of docs/pretraining.md: rows of a report of benchmarks/pretraining.py as a PNG file."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

FILE = "pretraining-reconstructions.png"
_TITLE = "Reconstructions"
_ROWS, _COLUMNS = 4, 2
_GAP, _WHITE = 8, (255, 255, 255)


def save_reconstructions(run: Path, folder: Path) -> None:
    """The first images of the report of a run of MAE, in a grid: what the encoder saw, the prediction, the image."""
    if (run / "report.html").exists():
        strips = images_of((run / "report.html").read_text(), _TITLE)
        made = sheet([beside(strip) for strip in strips[: _ROWS * _COLUMNS]], _COLUMNS)
        folder.mkdir(parents=True, exist_ok=True)
        made.quantize(256).save(folder / FILE, optimize=True)


def images_of(report: str, title: str) -> list[list[Image.Image]]:
    """The images of a section, row by row."""
    section = report.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
    encoded = [re.findall(r"data:image/png;base64,([^\"]+)", row) for row in section.split("<hr>")]
    return [[Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB") for one in row] for row in encoded]


def beside(images: Sequence[Image.Image]) -> Image.Image:
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    made, left = Image.new("RGB", (width, max(image.height for image in images)), _WHITE), 0
    for image in images:
        made.paste(image, (left, 0))
        left += image.width + _GAP
    return made


def sheet(strips: Sequence[Image.Image], columns: int) -> Image.Image:
    """Strips of one size in columns."""
    width, height = strips[0].width + 3 * _GAP, strips[0].height + _GAP
    rows = -(-len(strips) // columns)
    made = Image.new("RGB", (columns * width - 3 * _GAP, rows * height - _GAP), _WHITE)
    for place, strip in enumerate(strips):
        made.paste(strip, (place % columns * width, place // columns * height))
    return made
