"""Small folders of images, and runs of seconds on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.console import Console

TINY: dict[str, Any] = {
    "method": "dino", "model": "deit_nano", "model_options": {"depth": 2, "dim": 48, "patch_size": 8},
    "recipe": "dino@small", "resolution": 32, "workers": 0, "batch_size": 8, "epochs": 2, "local_crops": 2,
    "head_hidden": 32, "head_bottleneck": 16, "prototypes": 32, "device": "cpu", "console": Console(quiet=True),
}  # fmt: skip
Pretrain = Callable[..., Path]


def pattern(kind: int, draw: np.random.Generator, side: int = 40) -> Image.Image:
    """Stripes of one of three directions, in colours and at a width of their own."""
    y, x = np.mgrid[:side, :side]
    phase = (x, y, x + y)[kind] * draw.uniform(0.3, 0.9) + draw.uniform(0, 6)
    colours = draw.integers(0, 256, (2, 3))
    return Image.fromarray(np.where((np.sin(phase) > 0)[..., None], *colours).astype(np.uint8))


def write_folder(root: Path, count: int, classes: bool = False, side: int = 40) -> Path:
    """`count` patterns, flat or in one folder per direction."""
    draw = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"stripes{i % 3}" if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        pattern(i % 3, draw, side).save(folder / f"{i:03d}.png")
    return root


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """`write_folder`, for folders of other sizes."""
    return write_folder


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """24 images without classes."""
    return write_folder(tmp_path / "flat", 24)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """45 images in three classes, a fifth of which is held out."""
    return write_folder(tmp_path / "labelled", 45, classes=True)


@pytest.fixture
def pretrain(tmp_path: Path) -> Pretrain:
    """Runs `patchloom.pretrain` with tiny settings, and gives the run folder."""

    def run(data: Path, name: str = "run", **changes: Any) -> Path:
        options = {**TINY, **changes}
        options["model_options"] = {**TINY["model_options"], **changes.get("model_options", {})}
        return patchloom.pretrain(data, out=tmp_path / name, **options).folder

    return run


@pytest.fixture
def records() -> Callable[[Path], list[dict[str, Any]]]:
    """The records of a run's log."""
    return lambda run: [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
