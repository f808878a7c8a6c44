"""Two real processes (gloo, torchrun) against one, with copies and with shards, resumed on another number of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom.data.opening import open_source
from patchloom.errors import PatchloomError
from patchloom.training.run import Run

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


def test_shards_are_checked_and_resumed_to_the_same_bits_by_any_number_of_processes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("train", *WORDS, "epochs=2", "shard=full", "--out", str(out), processes=2)
    want, folder = tensors(out), out / "checkpoints"
    assert {path.name for path in folder.iterdir()} >= {"step-00000005.shards", "step-00000010.shards", "best.shards"}
    # the weights of a checkpoint are those of the export made at the same step
    shutil.move(out / "export", tmp_path / "export")
    loaded = patchloom.load(out).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in want.items())
    damaged = max(folder.glob("step-00000010.shards/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(PatchloomError, match="damaged"):
        patchloom.load(out)
    shutil.copytree(out, tmp_path / "by one")
    assert "step-00000010.shards is damaged" in run("resume", str(out), processes=2)
    assert all(torch.equal(tensors(out)[name], tensor) for name, tensor in want.items())
    assert "at step 5 of 10" in run("resume", str(tmp_path / "by one"))
    for name, tensor in tensors(tmp_path / "by one").items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-3, atol=1e-5)


def test_shards_with_an_average_need_no_checkpoint_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    run("train", *WORDS, "epochs=3", "checkpoint_every=100", "shard=full", "--out", str(tmp_path / "run"), processes=2)
    assert len(Run.open(tmp_path / "run").records()) == 3


def test_shards_of_a_run_stopped_before_an_evaluation_evaluate_and_train_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("train", *WORDS, "epochs=1", "model.stem=hmlp", "shard=full", "--out", str(out), processes=2)
    seal = out / "checkpoints" / "step-00000005.shards" / "seal.json"
    content = json.loads(seal.read_text())
    content["info"] |= {"evaluated": 0, "loss_sum": 1.0, "losses": {"loss": 1.0}, "weight": 1.0}
    seal.write_text(json.dumps(content))
    run("extend", str(out), "--epochs", "1", processes=2)
    assert len(Run.open(out).records()) == 2


def test_synchronised_batchnorm_makes_two_processes_equal_one(tmp_path: Path) -> None:
    words = [
        "digits", "--model", "patchconvnet_nano", "--recipe", "patchconvnet@small", "model.depth=1", "model.norm=batch",
        "model.scale_value=1.0", "img_size=16", "batch_size=128", "epochs=1", "seed=5", "workers=0", "drop_path=0",
        "mixup=0", "affine=0",
    ]  # fmt: skip
    run("train", *words, "--out", str(tmp_path / "one"))
    for name in ("true", "false"):
        run("train", *words, f"sync_batchnorm={name}", "--out", str(tmp_path / name), processes=2)
    want, synced, apart = (tensors(tmp_path / name) for name in ("one", "true", "false"))
    weights = [name for name in want if name.endswith("weight") and want[name].ndim > 1]
    distances = [max(float((one[n] - want[n]).abs().max()) for n in weights) for one in (synced, apart)]
    assert distances[0] < distances[1] / 10


def test_processes_agree_on_running_statistics(tmp_path: Path) -> None:
    """BatchNorm's statistics are those of all processes: what is exported scores as what was evaluated."""
    out = tmp_path / "run"
    run("train", *WORDS, "epochs=1", "model.stem=hmlp", "ema=0", "--out", str(out), processes=2)
    record = Run.open(out).records()[-1]
    assert patchloom.evaluate(out, "digits")["loss"] == pytest.approx(record["loss"], rel=1e-5)


def test_a_restart_that_one_torchrun_did_not_count_resumes_in_all_processes(alone: Path, tmp_path: Path) -> None:
    """torchrun counts a restart only on the machine where a process failed, and none on a machine started again."""
    shutil.copytree(alone, tmp_path / "run")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "patchloom", "train", *WORDS, "epochs=2", "--out", str(tmp_path / "run")]
    started = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(rank),
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "is already finished (2 epochs)" in outputs[0]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_process_that_loses_its_loader_worker_costs_no_step(shard: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [*WORDS, "epochs=400", "workers=1", f"shard={shard}", "checkpoint_every=1h", "eval_every=400 epochs"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*launcher, "-m", "patchloom", "train", *words, "--out", str(out)], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        worker = _loader_worker(started, rank=1)
        time.sleep(3)  # some steps
        os.kill(worker, signal.SIGKILL)
        _, said = started.communicate(timeout=120)
    finally:
        started.terminate()  # torchrun ends its processes
        started.wait()
    stopped = re.findall(r"patchloom: Training stopped at step (\d+), everything saved: (.*?)[.:]", said)
    assert {reason for _, reason in stopped} == {
        "A worker process that reads images ended unexpectedly", "another process cannot read its batch"
    }, said[-3000:]  # fmt: skip
    step = int(stopped[0][0])
    assert step > 0
    assert next((out / "checkpoints").glob(f"step-{step:08d}.*"))


@pytest.mark.parametrize("shard", ["none", "full"])
def test_an_image_that_one_process_cannot_read_in_an_evaluation_stops_all_with_a_message(
    shard: str, tmp_path: Path
) -> None:
    digits = open_source("digits")
    for i, item in enumerate(digits.splits["train"][:60]):
        path = tmp_path / "photos" / ("val" if i >= 48 else "train") / str(i % 2) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digits.read(item).save(path)
    out, words = tmp_path / "run", [*WORDS[1:], "batch_size=24", "epochs=40", "eval_every=40 epochs", f"shard={shard}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*launcher, "-m", "patchloom", "train", str(tmp_path / "photos"), *words, "--out", str(out)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        limit = time.time() + 120
        while not (out / "recipe.yaml").exists() and time.time() < limit:
            time.sleep(0.01)
        (tmp_path / "photos" / "val" / "0" / "50.png").unlink()
        _, said = started.communicate(timeout=120)
    finally:
        started.terminate()  # torchrun ends its processes
        started.wait()
    stopped = re.findall(r"patchloom: Training stopped at step 80, everything saved: (.*)\. `patchloom resume", said)
    assert sorted(reason.partition("50.png ")[2] or reason for reason in stopped) == [
        "another process cannot read its batch", "cannot be read as an image: No such file or directory"
    ], said[-3000:]  # fmt: skip
    assert "[rank" not in said  # how torch begins the lines of a traceback
    assert next((out / "checkpoints").glob("step-00000080.*"))


def test_two_processes_that_are_refused_a_folder_say_so_without_a_traceback(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Run(tmp_path / "run", {}).locked():
        done = subprocess.run(
            [*launcher, "-m", "patchloom", "train", *WORDS, "epochs=1", "--out", str(tmp_path / "run")],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert f"patchloom: Another process is training in {tmp_path / 'run'}." in done.stderr
    assert "[rank" not in done.stderr, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def _loader_worker(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process that reads images for the process with this rank, once there is one."""
    limit = time.time() + 120
    while time.time() < limit:
        assert launcher.poll() is None
        for process in _children(launcher.pid):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and (workers := _children(process)):
                return workers[0]
        time.sleep(0.1)
    raise AssertionError("no worker was started")


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
