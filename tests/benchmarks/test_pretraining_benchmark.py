"""The benchmark of pre-training: its data, a tiny run that is kept, a page from its rows, both sides of a step."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """An archive with the layout of coco128: twelve photos, whose red channel tells the tile of the chessboard."""
    folder = tmp_path / "coco128" / "images" / "train"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(12):
        photo = draw.integers(0, 256, (256, 192, 3), dtype=np.uint8)
        rows, columns = np.indices(photo.shape[:2]) // 64
        photo[..., 0] = 255 * ((rows + columns) % 2)
        Image.fromarray(photo).save(folder / f"{number:02d}.jpg", quality=95)
    with tarfile.open(tmp_path / "coco128.tar", "w") as tar:
        tar.add(tmp_path / "coco128", "coco128")
    return tmp_path


def test_training_and_test_crops_share_no_pixel(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = module("pretraining_data", monkeypatch)
    manifest = data.crops(archives / "coco128.tar", tmp_path / "crops", 3, 2)
    rows = list(csv.DictReader(manifest.read_text().splitlines()))
    assert len({row["label"] for row in rows}) == 10
    assert [row["split"] for row in rows].count("train") == 30
    assert [row["split"] for row in rows].count("val") == 20
    for row in rows:
        pixels = np.asarray(Image.open(manifest.parent / row["path"]))
        assert pixels.shape == (32, 32, 3)
        bright = pixels[..., 0].mean() > pixels[..., 1].mean()
        assert bright == (row["split"] == "val"), row
    stamp = manifest.stat().st_mtime_ns
    assert data.crops(archives / "coco128.tar", tmp_path / "crops", 3, 2).stat().st_mtime_ns == stamp  # made once


def test_draws_of_labels_are_balanced_and_differ(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = module("pretraining_data", monkeypatch)
    manifest = data.crops(archives / "coco128.tar", tmp_path / "crops", 6, 1)
    first, same, other = (data.draw_labels(manifest, 2, draw).read_text() for draw in (0, 0, 1))
    assert first == same != other
    rows = list(csv.DictReader(first.splitlines()))
    counts = {(row["label"], row["split"]): 0 for row in rows}
    for row in rows:
        counts[row["label"], row["split"]] += 1
    assert set(counts.values()) == {1, 2}
    assert all(count == (2 if split == "train" else 1) for (_, split), count in counts.items())


def run_row(part: str, model: str, seed: int, knn: float) -> dict[str, Any]:
    return {
        "part": part, "model": model, "seed": seed, "epochs": 9, "cpu_seconds": 60, "knn_before": 0.25, "knn": knn,
        "linear_before": 0.5, "linear": 0.75,
    }  # fmt: skip


def label_row(part: str, model: str, labels: int, pretrained: float, scratch: float) -> dict[str, Any]:
    row = {"part": f"{part} labels", "model": model, "seed": 0, "labels": labels, "draw": 0, "epochs": 30}
    return {**row, "pretrained": pretrained, "scratch": scratch}


def test_the_rows_make_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = module("pretraining_page", monkeypatch).page
    rows: list[dict[str, Any]] = [{"part": "pixels", "model": "pixels", "knn": 0.375, "train": 2000, "test": 1000}]
    rows += [run_row("dino", "vit", seed, 0.5 + seed / 10) for seed in range(2)] + [run_row("dino", "resmlp", 0, 0.25)]
    rows += [label_row("dino", "vit", 20, 0.75, 0.5), label_row("dino", "resmlp", 20, 0.5, 0.625)]
    rows += [run_row("mae", "vit", 0, 0.125), label_row("mae", "vit", 5, 0.5, 0.25), label_row("mae", "vit", 20, 1, 1)]
    speed = {
        "part": "speed", "model": "DINO, ViT-S", "peer": "lightly 1.6", "batch": 4, "images_per_s": 2.0,
        "peer_images_per_s": 1.25, "ratio": 1.6, "low": 1.5, "high": 1.75, "kept": 0.875, "kept_megabytes": 700.0,
        "peer_kept_megabytes": 800.0, "rounds": 9, "threads": 1,
    }  # fmt: skip
    text = page([*rows, speed], 18)
    assert "| ViT | 25.0 ± 0.0 | 55.0 ± 7.1 | +30.0 ± 7.1 | 50.0 ± 0.0 | 75.0 ± 0.0 | 2 |" in text
    assert "| ResMLP | 20 | 30 | 50.0 | 62.5 | -12.5 | 1 |" in text
    assert "Pixels: 37.5." in text
    assert "by the means: ViT 55.0, then ResMLP 25.0." in text
    assert "5 labels per class +25.0, 20 labels per class +0.0." in text
    row = "| DINO, ViT-S | 4 | 1.2 | 2.0 | 1.60 | 1.50 to 1.75 | 800 MB | 700 MB | 88% | speed |"
    assert row in text
    assert "incomplete: 4 of 18" in text
    assert "BeiT with three stems" not in text
    assert "{" not in text


@pytest.mark.slow
def test_runs_and_measurements_are_kept(archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = module("pretraining", monkeypatch)
    words = [str(archives), "--seeds", "1", "--epochs", "1", "--crops", "6", "2", "--out", str(tmp_path / "out")]
    options = benchmark.make_parser().parse_args(
        [*words, "--parts", "dino", "beit", "mae", "--page", str(tmp_path / "page.md")]
    )
    rows = benchmark.measured(options)
    probed = [row for row in rows if "knn_before" in row]
    assert [(row["part"], row["model"]) for row in probed] == [
        *(("dino", name) for name in ("vit", "resmlp")), *(("beit", name) for name in ("linear", "conv", "hmlp")),
        ("mae", "vit"),
    ]  # fmt: skip
    assert all(0 <= row[key] <= 1 for row in probed for key in ("knn_before", "knn", "linear_before", "linear"))
    classified = [row for row in rows if "labels" in row]
    assert {(row["model"], row["labels"], row["draw"]) for row in classified if row["part"] == "mae labels"} == {
        ("vit", 5, 0), ("vit", 5, 1), ("vit", 5, 2), ("vit", 20, 0), ("vit", 20, 1),
    }  # fmt: skip
    runs = tmp_path / "out" / "runs"
    assert [path.parent.name for path in sorted(runs.glob("beit-*/tokenizer"))] == ["beit-linear-0"]  # one per seed
    for row in classified:
        names = f"{row['part'].split()[0]}-{row['model']}-0"
        ours, scratch = (runs / f"{names}-{way}-{row['labels']}-{row['draw']}" for way in ("pretrained", "scratch"))
        assert (ours / "export" / "model.json").exists()
        assert (scratch / "export" / "model.json").exists()
    for name in ("features", "labelled", "pixels"):  # nothing is measured again
        monkeypatch.setattr(benchmark, name, None)
    assert benchmark.measured(options) == rows
    assert "hMLP" in (tmp_path / "page.md").read_text()


def test_strips_of_a_report_become_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = module("pretraining_pictures", monkeypatch)
    from patchloom.tasks.pretraining.pictures import figure, row

    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    rows = [row([figure(Image.new("RGB", (8, 8), colour), "x") for colour in colours[i:]]) for i in (0, 0)]
    report = f"<h2>curves</h2><svg/><h2>Reconstructions</h2><p>note</p>{'<hr>'.join(rows)}<h2>other</h2>"
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.html").write_text(report)
    pictures.save_reconstructions(run, tmp_path / "images")
    made = Image.open(tmp_path / "images" / "pretraining-reconstructions.png").convert("RGB")
    assert made.size == (2 * (3 * 128 + 2 * 8) + 3 * 8, 128)
    assert [made.getpixel((x, 64)) for x in (64, 64 + 136, 64 + 272, 64 + 424)] == [*colours, colours[0]]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # lightly's
@pytest.mark.parametrize("name", ["DINO, tiny", "MAE, tiny"])
def test_both_sides_of_a_step_have_the_same_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightly")
    speed = module("pretraining_speed", monkeypatch)
    case = speed.TINY[name]
    if name.startswith("DINO"):  # the two resize positions differently, which local crops need
        case = dataclasses.replace(case, settings={**case.settings, "local_crops": 0})
    torch.manual_seed(0)
    row = speed.measure(name, case, 1)
    assert row["loss"] == pytest.approx(row["peer_loss"], abs=1e-4)
    assert 0 < row["kept"] < 1
    assert row["ratio"] > 0
