"""Runs of Grafit that are killed at any step and resumed: the same bits, with memory and target network."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

ONE = ["-m", "patchloom"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "patchloom"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """31 images of noise in two coarse and four fine classes; 23 to train on."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(31):
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f"{i:02d}.png")
        rows.append([f"{i:02d}.png", f"fine{i % 4}", f"coarse{i % 4 // 2}", "train" if i < 23 else "val"])
    with open(tmp_path / "photos.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "fine", "coarse", "split"], *rows])
    return tmp_path / "photos.csv"


def words(photos: Path, out: Path) -> list[str]:
    return [
        "grafit", str(photos), "--model", "resmlp_nano", "--labels", "coarse", "--out", str(out), "--views", "2",
        "img_size=32", "model.depth=2", "model.dim=32", "workers=0", "epochs=8", "batch_size=8", "checkpoint_every=1",
        "projector_hidden=16", "projector_dim=12", "predictor_hidden=16", "erasing=0.25", "drop_path=0.1",
        "eval_every=4 epochs", "target_decay=0.9",
    ]  # fmt: skip


def run(launcher: list[str], *command: str) -> None:
    done = subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]


def killed(launcher: list[str], command: list[str], out: Path, after: int) -> None:
    """Start, and kill with SIGKILL once a checkpoint of at least step `after` is there."""
    process = subprocess.Popen(
        [sys.executable, *launcher, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    limit = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < limit:
        steps = [int(path.stem[5:]) for path in (out / "checkpoints").glob("step-*.safetensors")]
        if steps and max(steps) >= after:
            break
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last(out: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((out / "checkpoints").glob("step-*.safetensors"))[-1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [ONE, TWO], ids=["one process", "two processes"])
def test_a_run_killed_twice_ends_with_the_same_bits(launcher: list[str], photos: Path, tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    run(launcher, *words(photos, straight))
    draw = random.Random(1)
    killed(launcher, words(photos, cut), cut, draw.randint(2, 4))
    killed(launcher, ["resume", str(cut)], cut, draw.randint(7, 9))
    run(launcher, "resume", str(cut))
    one, other = last(straight), last(cut)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    exports = [(out / "export" / "model.safetensors").read_bytes() for out in (straight, cut)]
    assert exports[0] == exports[1]
    assert one["state.memory"].shape == (23, 12)
    torch.testing.assert_close(one["state.memory"].norm(dim=1), torch.ones(23))
    name = next(key.removeprefix("model.") for key in one if key.startswith("model.trunk") and one[key].ndim == 2)
    assert not torch.equal(one[f"model.{name}"], one[f"target.{name}"])


@pytest.mark.slow
def test_a_run_of_one_process_is_resumed_by_two(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed(ONE, words(photos, out), out, 3)
    run(TWO, "resume", str(out))
    assert (out / "export" / "model.json").exists()
    assert last(out)["state.memory"].shape == (23, 12)
