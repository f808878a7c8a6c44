"""DINO that is killed at any step and resumed, on several processes, and sharded: the same result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pretraining_runs
import pytest
import torch
from safetensors.torch import load_file

import patchloom

flat, labelled = pretraining_runs.flat, pretraining_runs.labelled

ONE = ["-m", "patchloom"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "patchloom"]


def words(data: Path, out: Path, *more: str) -> list[str]:
    return [
        "pretrain", str(data), "--method", "dino", "--model", "deit_nano", "--recipe", "dino@small", "--out", str(out),
        "img_size=32", "model.patch_size=8", "model.depth=2", "model.dim=48", "workers=0", "epochs=6", "batch_size=8",
        "checkpoint_every=1", "local_crops=2", "prototypes=32", "head_hidden=32", "head_bottleneck=16", *more,
    ]  # fmt: skip


def run(launcher: list[str], *command: str) -> str:
    done = subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    return done.stdout


def killed(command: list[str], out: Path, after: int) -> None:
    """Start, and kill with SIGKILL once a checkpoint of at least step `after` is there."""
    process = subprocess.Popen(
        [sys.executable, *ONE, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
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


def measured(out: Path) -> list[dict[str, object]]:
    rows = {}
    for line in (out / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = {name: value for name, value in row.items() if name not in ("time", "images_per_second")}
    return [rows[step] for step in sorted(rows)]


@pytest.mark.slow
def test_a_run_killed_twice_ends_with_the_same_bits(labelled: Path, tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    more = ("drop_path=0.1", "probe_every=2", "freeze_last_layer=2")
    run(ONE, *words(labelled, straight, *more))
    draw = random.Random(1)
    killed(words(labelled, cut, *more), cut, draw.randint(2, 5))
    killed(["resume", str(cut)], cut, draw.randint(9, 14))
    run(ONE, "resume", str(cut))
    one, other = last(straight), last(cut)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    exports = [(out / "export" / "model.safetensors").read_bytes() for out in (straight, cut)]
    assert exports[0] == exports[1]
    assert measured(straight) == measured(cut)
    assert float(one["state.centre"].abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("shard=full",), ("accumulate=2",)], ids=["ddp", "fsdp", "accumulate"])
def test_two_processes_equal_one(more: tuple[str, ...], flat: Path, tmp_path: Path) -> None:
    run(ONE, *words(flat, tmp_path / "one", "epochs=3"))
    run(TWO, *words(flat, tmp_path / "two", "epochs=3", *more))
    x = torch.randn(16, 3, 32, 32)
    with torch.no_grad():
        first, second = (patchloom.load(tmp_path / name).embed(x) for name in ("one", "two"))
    assert float((first - second).abs().mean() / first.abs().mean()) < 1e-3
    for a, b in zip(measured(tmp_path / "one"), measured(tmp_path / "two"), strict=True):
        for name in {"train_loss", "std", "entropy"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=1e-3)


def test_a_given_up_step_leaves_nothing(flat: Path) -> None:
    """A signal between losses and update: the centre and the teacher are those of the checkpoint."""
    from patchloom.console import Console
    from patchloom.tasks.pretraining.plans import plan_pretraining
    from patchloom.tasks.pretraining.setup import open_task
    from patchloom.tasks.spec import Context
    from patchloom.training.processes import Processes

    settings = {"epochs": 1, "resolution": 32, "workers": 0, "batch_size": 8, "local_crops": 2}
    plan = plan_pretraining(flat, "deit_nano", "dino", "dino@small", settings)
    task = open_task(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))
    before = {name: tensor.clone() for name, tensor in {**task.state(), **task.modules.state_dict()}.items()}
    batch = next(task.batches(0, 1))
    task.losses(batch, 0, 0)
    after = {**task.state(), **task.modules.state_dict()}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    task.losses(batch, 0, 0)
    task.after_step(1)
    once = task.state()["centre"].clone()
    other = open_task(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))
    other.losses(batch, 0, 0)
    other.after_step(1)
    torch.testing.assert_close(other.state()["centre"], once)
