"""`patchloom predict` and its neighbours on names and files that cannot be read, as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.inference.predict import predict


def run(*words: object, cwd: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchloom", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model and a photo."""
    model = patchloom.create_model("deit_nano", num_classes=3, depth=1)
    model.class_names = ("ant", "bee", "cow")
    patchloom.save(model, tmp_path / "m.safetensors")
    Image.new("RGB", (40, 32), (200, 30, 9)).save(tmp_path / "good.png")
    return tmp_path


def test_nothing_readable_is_exit_code_2_and_each_name_is_printed_once(place: Path) -> None:
    done = run("predict", "m.safetensors", "nowhere.png", "never.png", cwd=place)
    assert done.returncode == 2
    assert done.stdout == "nowhere.png: No such file or directory\nnever.png: No such file or directory\n"
    assert done.stderr == "patchloom: No image could be classified; the reasons are given above.\n"
    mixed = run("predict", "m.safetensors", "nowhere.png", "good.png", "--json", cwd=place)
    first, second = json.loads(mixed.stdout)
    assert mixed.returncode == 0
    assert first == {"path": "nowhere.png", "error": "No such file or directory"}
    assert len(second["predictions"]) == 3


def test_a_folder_without_images_is_described_as_such(place: Path) -> None:
    (place / "no photos").mkdir()
    done = run("predict", "m.safetensors", "no photos", cwd=place)
    assert done.returncode == 2
    assert done.stdout == "no photos: the folder contains no images\n"


def test_one_bad_image_never_costs_the_others(place: Path) -> None:
    os.mkfifo(place / "pipe.png")
    (place / "zero.png").symlink_to("/dev/zero")
    (place / "loop.png").symlink_to("loop.png")
    (place / "torn.png").write_bytes((place / "good.png").read_bytes()[:60])
    with open(place / "huge.png", "wb") as file:
        file.truncate(1 << 40)
    Image.fromarray(np.linspace(0, 1, 1024, dtype=np.float32).reshape(32, 32)).save(place / "deep.tif")
    names = ["", "a\0b", "x" * 5000, *(str(place / f"{n}.png") for n in ("pipe", "zero", "loop", "torn", "huge"))]
    *bad, good, deep = predict(place / "m.safetensors", [*names, place / "good.png", place / "deep.tif"], top=2)
    assert all("error" in row for row in bad), bad
    reasons = [row["error"] for row in bad]
    assert all(part in " ".join(reasons) for part in ("NUL", "FIFO", "device", "links", "truncated", "limit")), reasons
    assert len(good["predictions"]) == len(deep["predictions"]) == 2
    assert deep["note"] == "values from 0 to 1 scaled to 8 bits"
    rows = {Path(row["path"]).name: row for row in predict(place / "m.safetensors", place)}
    assert [name for name, row in rows.items() if "predictions" in row] == ["deep.tif", "good.png"]


def test_an_empty_name_is_not_the_current_folder(place: Path) -> None:
    for name in ("ant", "bee"):
        (place / name).mkdir()
        (place / name / "a.png").hardlink_to(place / "good.png")
    done = run("train", "", "--model", "deit_nano", "--recipe", "deit@small", "--out", "run", cwd=place)
    assert done.returncode == 2, done.stderr
    assert "empty name" in done.stderr.lower()
    assert not (place / "run" / "recipe.yaml").exists()


def test_deeply_nested_json_is_one_message(place: Path) -> None:
    (place / "deep.json").write_text("[" * 100_000)
    done = run("evaluate", "m.safetensors", "digits", "--class-map", "deep.json", cwd=place)
    assert done.returncode == 2
    assert done.stderr == "patchloom: deep.json cannot be read as JSON: it is nested too deeply.\n"
