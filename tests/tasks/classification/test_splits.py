"""The splits that a run is asked for: kept, resumed with, and what `evaluate` takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import patchloom
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.inference.probes import probe
from patchloom.runs.launch import resume
from patchloom.tasks.classification.evaluate import scores

SMALL = {
    "model": "deit_nano",
    "recipe": "deit@small",
    "model_options": {"depth": 1},
    "resolution": 16,
    "epochs": 1,
    "batch_size": 4,
    "workers": 0,
    "console": Console(quiet=True),
}


def photos(root: Path, counts: dict[str, int]) -> Path:
    """For each folder that is to hold classes, so many images of two classes each."""
    draw = np.random.default_rng(0)
    for split, count in counts.items():
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def test_a_run_keeps_its_splits_and_evaluate_takes_its_test_split(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {"train": 4, "val": 3, "test": 2})
    run = patchloom.train(data, out=tmp_path / "run", train_split="train+val", test_split="test", **SMALL)
    kept = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    assert (kept["train_split"], kept["test_split"]) == ("train+val", "test")
    assert "14 images of train+val" in json.loads((run.folder / "environment.json").read_text())["data"]["split"]
    assert scores(run.folder, data).keys == scores(run.folder, data, split="test").keys
    assert len(scores(run.folder, data, split="val").keys) == 6
    assert probe(run.folder, data, "knn", k=2)["trained_on"] == 14
    resume(run.folder, Console(quiet=True), more_epochs=1)
    assert scores(run.folder, data).summary()["count"] == 4
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["train_split"] == "train+val"


def test_only_the_test_split_of_a_run_must_be_in_the_data(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {"train": 4, "val": 3, "test": 2})
    run = patchloom.train(data, out=tmp_path / "run", train_split="train+val", test_split="test", **SMALL)
    part = photos(tmp_path / "part", {"val": 3, "test": 2})
    assert all(key.startswith("test/") for key in scores(run.folder, part).keys)


def test_a_split_that_is_named_is_the_datas(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {"train": 4, "val": 3, "test": 2})
    run = patchloom.train(data, out=tmp_path / "run", train_split="all", **SMALL)
    for split, count in (("train", 8), ("val", 6), ("test", 4)):
        keys = scores(run.folder, data, split=split).keys
        assert len(keys) == count
        assert all(key.startswith(f"{split}/") for key in keys)
    with pytest.raises(PatchloomError, match="--split is empty"):
        scores(run.folder, data, split="")


def test_distillation_and_a_second_stage_keep_the_splits(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {"train": 4, "val": 3, "test": 2})
    splits = ["--train-split", "train+val", "--test-split", "test"]
    words = ["--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "epochs=1", "workers=0", *splits]
    main(
        ["train", str(data), "--out", str(tmp_path / "low"), *words, "img_size=16", "--finish", "24", "finish.epochs=1"]
    )
    main(["distill", str(tmp_path / "low"), str(data), "--out", str(tmp_path / "student"), *words, "img_size=16"])
    for run in (tmp_path / "low" / "low", tmp_path / "low", tmp_path / "student"):
        kept = yaml.safe_load((run / "recipe.yaml").read_text())
        assert (kept["train_split"], kept["test_split"]) == ("train+val", "test")
        assert scores(run, data).summary()["count"] == 4


def test_the_command_takes_splits(tmp_path: Path, capsys) -> None:
    data = photos(tmp_path / "data", {"train": 4, "val": 3, "test": 2})
    words = ["--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "img_size=16", "epochs=1", "workers=0"]
    splits = ["--train-split", "train+val", "--test-split", "test"]
    main(["train", str(data), "--out", str(tmp_path / "run"), *words, *splits])
    assert "14 training images, 4 held out" in capsys.readouterr().out
    flat = photos(tmp_path / "flat", {".": 10})
    for asked, counts in (("0.3", "14 training images, 6 held out"), ("none", "20 training images, 0 held out")):
        main(["train", str(flat), "--out", str(tmp_path / asked), *words, "--hold-out", asked])
        assert counts in capsys.readouterr().out


def test_without_held_out_images_all_are_trained_on(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {".": 5})
    run = patchloom.train(data, out=tmp_path / "run", hold_out="none", log_norms=True, ema=0.9, **SMALL)
    assert not {"top1", "ema_top1"} & set(run.records()[-1])
    assert (run.folder / "export" / "model.safetensors").exists()
    assert "No image was held out" in (run.folder / "report.html").read_text()
    resume(run.folder, Console(quiet=True), more_epochs=1)
    with pytest.raises(PatchloomError, match="held out no image"):
        scores(run.folder, data)
    assert len(scores(run.folder, data, split="all").keys) == 10


def test_a_share_of_data_with_a_test_split_is_held_out(tmp_path: Path) -> None:
    data = photos(tmp_path / "data", {"train": 4, "test": 2})
    run = patchloom.train(data, out=tmp_path / "run", hold_out=0.25, **SMALL)
    held_out = scores(run.folder, data).keys
    assert len(held_out) == 2
    assert all(key.startswith("train/") for key in held_out)
    assert len(scores(run.folder, data, split="test").keys) == 4
