"""The benchmark of Grafit: manifests, one tiny run that is kept, a page from its rows."""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def grafit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("grafit")


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """An archive with the layout of CIFAR-10 as photos: four classes, five images of each for training, two for
    tests."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 5), ("test", 2)):
        for name in ("cat", "dog", "ship", "truck"):
            folder = tmp_path / "cifar10_jpeg" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    with tarfile.open(tmp_path / "cifar10_jpeg.tar", "w") as tar:
        tar.add(tmp_path / "cifar10_jpeg", "cifar10_jpeg")
    return tmp_path


def row(model: str, method: str, seed: int, value: float) -> dict[str, Any]:
    figures = dict.fromkeys(("knn", "map_none", "map_coarse", "map_oracle", "knn_coarse"), value)
    run = {"part": "search", "model": model, "method": method, "seed": seed, "epochs": 3}
    return {**run, **figures, "queries": 40, "collection": 90}


def test_the_rows_make_a_page(grafit: ModuleType) -> None:
    methods = [name for name in grafit.METHODS if name != "grafit"]
    rows = [row("pets-vit", name, seed, 0.25 + seed / 10) for name in methods for seed in range(2)]
    rows += [row("pets-vit", "frozen", 0, 0.125), row("pets-vit", "grafit", 0, 0.5)]
    each = {"cat": 12, "dog": 24}
    rows.append(
        {
            "part": "clusters",
            "model": "pets-vit",
            "method": "frozen",
            "clusters": None,
            "each": each,
            "ari": 0.5,
            "purity": 0.625,
        }
    )
    text = grafit.page(rows, grafit.CASES, 2)
    assert "| before training | 12.5 | 12.5 | 12.5 | 12.5 | 12.5 | 1 |" in text
    assert "| SNCA+ | 30.0 ± 7.1 |" in text
    assert "kNN of Grafit is above baseline (CE) and SNCA+" in text
    assert "| pets-vit | k-means on the frozen network | auto | cat 12, dog 24 | 0.500 | 0.625 |" in text
    assert "77.7 / 52.9 / 55.7 / 59.3" in text
    assert "incomplete: 7 of 36 runs" in text
    assert "{" not in text


@pytest.mark.slow
def test_runs_and_measurements_are_kept(
    grafit: ModuleType, archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(archives), "none", "--cases", "cifar10-nano", "--seeds", "1", "--epochs", "1"]
    options = grafit.make_parser().parse_args(
        [*words, "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    )
    rows = grafit.measured(options)
    assert [found["method"] for found in rows] == list(grafit.METHODS)
    assert all(0 < found["map_oracle"] <= 1 and found["queries"] == 8 and found["collection"] == 20 for found in rows)
    manifest = (tmp_path / "out" / "data" / "cifar10" / "images.csv").read_text()
    assert "cifar10_jpeg/test/ship/0.jpg,ship,vehicle,test" in manifest
    monkeypatch.setattr(grafit, "measured_run", None)  # nothing is measured again
    assert grafit.measured(options) == rows
    assert "Grafit FC" in (tmp_path / "page.md").read_text()
