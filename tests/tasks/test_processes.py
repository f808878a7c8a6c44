"""Two real processes (gloo, torchrun) against one, with copies and with shards, resumed on another number of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORDS = [
    "digits", "--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "model.dim=24", "model.heads=2",
    "img_size=16", "batch_size=256", "seed=5", "workers=0", "drop_path=0", "mixup=0", "ema=0.9",
]  # fmt: skip


def run(*words: str, processes: int = 1) -> str:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "patchloom", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    run("train", *WORDS, "epochs=2", "--out", str(out))
    return out


@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_train_the_same_network_as_one(shard: str, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    run("train", *WORDS, "epochs=2", f"shard={shard}", "--out", str(out), processes=2)
    want, got = tensors(alone), tensors(out)
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-5)


def test_a_run_of_two_shards_is_extended_by_one_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("train", *WORDS, "epochs=1", "shard=full", "--out", str(out), processes=2)
    assert "at step 5 of 10" in run("extend", str(out), "--epochs", "1")
    run("extend", str(out), "--epochs", "1", processes=2)
