"""The loop with three toy tasks: a memory and a moving target, sequences of different lengths, and two networks.

Every promise is checked for each of them: killed runs end with the same bits, two processes and accumulated steps give
the losses of one, shards those of copies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import SHARES, STEPS, TOYS, Pair, Sequences, Statistics, cut, train

import patchloom
from patchloom.errors import PatchloomError, StoppedError
from patchloom.models.roles import layer_depths
from patchloom.training.checkpoints import read_checkpoint
from patchloom.training.run import Run

SCRIPT = Path(__file__).with_name("toys.py")
CHILD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATIENCE = 240  # seconds


class Padded(NamedTuple):
    tokens: Tensor
    lengths: Tensor


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def checkpoint(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    return read_checkpoint(folder / "checkpoints" / f"step-{step:08d}.safetensors").tensors


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    records = Run.open(folder).records()
    return [{k: v for k, v in row.items() if k != "time" and not k.endswith("per_second")} for row in records]


def assert_same_curves(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6, abs=1e-9)
        numbers = [{k: v for k, v in row.items() if k not in ("event", "losses")} for row in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every toy trained by one process, without a break."""
    out = tmp_path_factory.mktemp("straight")
    for name, make in TOYS.items():
        train(make(), out / name)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make of every toy: see `toys.train_all`."""
    out = tmp_path_factory.mktemp("two")
    words = [sys.executable, *LAUNCHER, str(SCRIPT), str(out)]
    done = subprocess.run(words, env=CHILD, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", TOYS)
def test_a_run_killed_between_checkpoints_ends_with_the_same_bits(name: str, straight: Path, tmp_path: Path) -> None:
    """kill -9 after 5 of 8 steps, when the last checkpoint is of step 4."""
    out = tmp_path / "run"
    reached = out / "checkpoints" / "step-00000004.safetensors"
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(out), name, "5"], env=CHILD)
    limit = time.monotonic() + PATIENCE
    try:
        while not reached.exists():
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (out / "export").exists()
    done: list[int] = []

    class Noted(patchloom.Callback):
        def after_step(self, step: int, losses: Mapping[str, float]) -> None:
            done.append(step)

    train(TOYS[name](), out, callbacks=[Noted()])
    assert done == [5, 6, 7, 8]
    assert same(tensors(out), tensors(straight / name))
    assert same(checkpoint(out), checkpoint(straight / name))
    assert curve(out) == curve(straight / name)


@pytest.mark.parametrize("name", TOYS)
def test_two_processes_with_unequal_shares_equal_one(name: str, straight: Path, two: Path) -> None:
    """A weighted mean over all: of 8 samples the first has 5, and of sequences most of the tokens."""
    assert_same_curves(curve(two / f"{name}-none"), curve(straight / name))
    want, got = checkpoint(straight / name), checkpoint(two / f"{name}-none")
    assert want.keys() == got.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TOYS)
def test_shards_equal_copies(name: str, two: Path) -> None:
    assert_same_curves(curve(two / f"{name}-full"), curve(two / f"{name}-none"))
    want, got = tensors(two / f"{name}-none"), tensors(two / f"{name}-full")
    assert want.keys() == got.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-6, atol=1e-9)
    assert (two / f"{name}-full" / "checkpoints" / f"step-{STEPS:08d}.shards" / "seal.json").exists()


@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("name", TOYS)
def test_two_processes_resume_to_the_same_bits(name: str, shard: str, two: Path) -> None:
    run, resumed = two / f"{name}-{shard}", two / f"{name}-{shard}-cut"
    assert same(tensors(resumed), tensors(run))
    assert curve(resumed) == curve(run)
    assert len((resumed / "log.jsonl").read_text().splitlines()) == 5  # the last evaluation is logged twice: it resumed


def test_only_normalisation_statistics_are_averaged_over_processes(two: Path) -> None:
    ranks = [load_file(two / "statistics-none" / f"rank-{rank}.safetensors") for rank in (0, 1)]
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(ranks[0][name], ranks[1][name])
    for name in ("queue", "seen"):
        assert not torch.allclose(ranks[0][name], ranks[1][name])
    task = Statistics()
    mean = torch.zeros(6, dtype=torch.float64)
    for batch in task.batches(0, STEPS):
        shares = batch["data"][0].split(SHARES)
        mean = 0.9 * mean + 0.1 * sum(share.mean(dim=0) for share in shares) / len(shares)
    torch.testing.assert_close(ranks[0]["0.running_mean"], mean, rtol=1e-5, atol=1e-6)


def test_queues_of_every_process_survive_a_resume(two: Path) -> None:
    run, resumed = two / "statistics-none", two / "statistics-none-cut"
    assert same(tensors(resumed), tensors(run))
    for rank in (0, 1):
        before, after = (load_file(folder / f"rank-{rank}.safetensors")["queue"] for folder in (run, resumed))
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_steps_equal_whole_ones(name: str, accumulate: int, straight: Path, tmp_path: Path) -> None:
    train(TOYS[name](), tmp_path / "run", accumulate=accumulate)
    assert_same_curves(curve(tmp_path / "run"), curve(straight / name))
    want, got = checkpoint(straight / name), checkpoint(tmp_path / "run")
    assert want.keys() == got.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TOYS)
def test_the_average_covers_the_modules_that_the_task_names(name: str, straight: Path) -> None:
    saved, task = checkpoint(straight / name), TOYS[name]()
    assert {key.split(".")[1] for key in saved if key.startswith("ema.")} == set(task.averaged)
    export = tensors(straight / name)
    for part in task.trained:
        prefix = f"{part}." if len(task.trained) > 1 else ""
        for key in task.modules[part].state_dict():
            raw = saved[f"{part}.{key}"]
            assert torch.equal(export[prefix + key], saved.get(f"ema.{part}.{key}", raw))
            assert torch.equal(export[prefix + key], raw) == (part not in task.averaged)
    optimized = {key.split(".")[1] for key in saved if key.startswith("optimizer.")}
    assert optimized == set(task.trained)


@pytest.mark.parametrize("name", TOYS)
def test_named_losses_sum_to_the_training_loss(name: str, straight: Path) -> None:
    for record in Run.open(straight / name).records():
        assert len(record["losses"]) > 1
        assert sum(record["losses"].values()) == pytest.approx(record["train_loss"], rel=1e-12)


def test_tokens_are_what_the_loss_of_sequences_is_a_mean_over(tmp_path: Path) -> None:
    """Against the mean over all tokens of an epoch, computed at once, with weights that do not change."""
    task = Sequences()
    train(task, tmp_path / "run", lr=0.0, min_lr=0.0, weight_decay=0.0, ema=0.0, epochs=1, steps=None, eval_every="3")
    (record,) = Run.open(tmp_path / "run").records()
    assert record["losses"]["likelihood"] == pytest.approx(record["error"], rel=1e-12)


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_the_best_checkpoint_follows_the_direction_of_the_metric(higher_is_better: bool, tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 2.5]

    class Given(Pair):
        metric = patchloom.Metric("value", higher_is_better=higher_is_better)

        def evaluate(self, modules: nn.ModuleDict, after_batch: Any) -> dict[str, Any]:
            return {"value": values.pop(0)}

    train(Given(), tmp_path / "run", ema=0.0)
    want = {"value": 3.0, "step": 2} if higher_is_better else {"value": 1.0, "step": 4}
    assert json.loads((tmp_path / "run" / "export" / "model.json").read_text())["best"] == want
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert best.info["best"] == want
    assert best.info["step"] == want["step"]


def test_without_a_metric_the_newest_checkpoint_is_the_best(tmp_path: Path) -> None:
    class Unmeasured(Pair):
        metric = None

    train(Unmeasured(), tmp_path / "run")
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors").info["step"] == STEPS


def test_callbacks_hear_of_every_step_and_evaluation(straight: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, dict[str, float]]] = []
    records: list[dict[str, Any]] = []

    class Noted(patchloom.Callback):
        def after_step(self, step: int, losses: Mapping[str, float]) -> None:
            steps.append((step, dict(losses)))

        def after_evaluation(self, record: Mapping[str, Any]) -> None:
            records.append(dict(record))

    train(Pair(), tmp_path / "run", callbacks=[Noted()])
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert records == Run.open(tmp_path / "run").records()
    for i, record in enumerate(records):  # all batches have 8 samples
        pair = [losses for _, losses in steps[2 * i : 2 * i + 2]]
        assert record["losses"] == pytest.approx({name: (pair[0][name] + pair[1][name]) / 2 for name in pair[0]})
    with pytest.raises(PatchloomError, match="Callback, not function"):
        train(Pair(), tmp_path / "other", callbacks=[lambda: None])


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"steps": None, "epochs": 2, "eval_every": "1 epoch"}, [3, 6]),
        ({"steps": None, "epochs": 3, "eval_every": "2 epochs"}, [6, 9]),
        ({"steps": 5, "eval_every": "1 epoch"}, [3, 5]),
        ({"steps": 5, "eval_every": "4"}, [4, 5]),
    ],
)
def test_duration_and_intervals_are_in_epochs_or_steps(changes: dict, steps: list[int], tmp_path: Path) -> None:
    train(Sequences(), tmp_path / "run", **changes)
    assert [record["step"] for record in Run.open(tmp_path / "run").records()] == steps
    with safe_open(tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:08d}.safetensors", "pt") as file:
        assert "optimizer.model.1.weight.exp_avg" in file.keys()  # noqa: SIM118 - not a mapping


def test_rates_and_decay_reach_the_optimizer_by_their_formulas(tmp_path: Path) -> None:
    """The rate of a parameter is 0.5 to the power of the layers after it; decay goes from 0.1 to 0.4 for matrices."""
    task = Pair()
    names = {id(parameter): name for name, parameter in task.modules.named_parameters()}
    seen: list[dict[str, tuple[float, float]]] = []
    original = torch.optim.AdamW.step

    def noting(self: torch.optim.AdamW, *arguments: Any) -> Any:
        groups = self.param_groups
        seen.append({names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]})
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noting)
        train(task, tmp_path / "run", layer_decay=0.5, weight_decay_end=0.4, min_lr=0.001)
    trained = nn.ModuleDict({name: task.modules[name] for name in task.trained})
    depths = layer_depths(trained)
    assert {depths["left.stem.weight"], depths["left.blocks.0.weight"], depths["left.head.weight"]} == {0, 1, 3}
    assert (depths["right.0.weight"], depths["right.1.weight"]) == (2, 3)  # ends where the deeper one ends
    assert len(seen) == STEPS
    for step, values in enumerate(seen):
        assert values.keys() == depths.keys()
        falling = (1 + math.cos(math.pi * step / STEPS)) / 2
        for name, (rate, decay) in values.items():
            assert rate == pytest.approx((0.001 + 0.019 * falling) * 0.5 ** (3 - depths[name]), rel=1e-12)
            matrix = task.modules.get_parameter(name).ndim > 1
            assert decay == (pytest.approx(0.4 - 0.3 * falling, rel=1e-12) if matrix else 0.0)


class Spoiled(Statistics):
    """NaN at step 5, in the first attempt; BatchNorm has seen the batch by then."""

    def __init__(self, spoiled_at: int | None) -> None:
        super().__init__()
        self.spoiled_at = spoiled_at

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        losses = super().losses(batch, step, part)
        return {name: loss * (math.nan if step == self.spoiled_at else 1) for name, loss in losses.items()}


def test_a_loss_that_is_nan_changes_nothing_and_all_before_it_is_saved(tmp_path: Path) -> None:
    task = Spoiled(5)
    before: dict[str, Tensor] = {}

    class Noted(patchloom.Callback):
        def after_step(self, step: int, losses: Mapping[str, float]) -> None:
            before.update({name: tensor.clone() for name, tensor in task.modules.state_dict().items()})

    with pytest.raises(StoppedError, match=r"not finite \(nan\) at step 5.*state before it is saved"):
        train(task, tmp_path / "run", callbacks=[Noted()])
    saved = checkpoint(tmp_path / "run", 5)
    assert same(task.modules.state_dict(), before)
    assert same({name: saved[name] for name in before}, before)
    train(Spoiled(None), tmp_path / "run")
    train(Spoiled(None), tmp_path / "healthy")
    assert same(checkpoint(tmp_path / "run"), checkpoint(tmp_path / "healthy"))
    assert curve(tmp_path / "run") == curve(tmp_path / "healthy")


def test_settings_that_change_no_result_may_change_when_a_run_is_resumed(straight: Path, tmp_path: Path) -> None:
    train(Pair(), tmp_path / "whole")
    cut(tmp_path / "whole", tmp_path / "run")
    train(Pair(), tmp_path / "run", workers=1, checkpoint_every="1", shard="none")
    assert same(tensors(tmp_path / "run"), tensors(straight / "pair"))
    with pytest.raises(PatchloomError, match=r"other settings: lr is 0\.5, was 0\.02"):
        train(Pair(), tmp_path / "run", lr=0.5)


def test_a_step_without_anything_to_count_is_not_an_error(tmp_path: Path) -> None:
    class Empty(Sequences):
        def weight(self, batch: Any) -> float:
            return 0.0

        def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
            return {name: 0.0 * loss for name, loss in super().losses(batch, step, part).items()}

    train(Empty(), tmp_path / "run", callbacks=[patchloom.Callback()])
    assert [record["train_loss"] for record in Run.open(tmp_path / "run").records()] == [0.0] * 4


def test_batches_that_end_too_early_are_refused_and_further_ones_left(straight: Path, tmp_path: Path) -> None:
    class Short(Pair):
        def batches(self, start: int, end: int) -> Any:
            yield from super().batches(start, 7)

    class Long(Pair):
        def batches(self, start: int, end: int) -> Any:
            yield from super().batches(start, end + 3)

    with pytest.raises(PatchloomError, match=r"batches\(0, 8\) ended at step 7"):
        train(Short(), tmp_path / "short")
    train(Long(), tmp_path / "long")
    assert same(tensors(tmp_path / "long"), tensors(straight / "pair"))


def test_named_tuples_are_split_like_tuples(straight: Path, tmp_path: Path) -> None:
    class Named(Sequences):
        def samples(self, chosen: Tensor) -> Any:
            return Padded(*super().samples(chosen))

    train(Named(), tmp_path / "run", accumulate=2)
    assert_same_curves(curve(tmp_path / "run"), curve(straight / "sequences"))


def kill_all(out: Path) -> None:
    """kill -9 of every process that has `out` among its words. torchrun gives its workers sessions of their own, so the
    launcher's process group does not contain them."""
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if str(out).encode() in words.read_bytes().split(b"\0"):
                os.kill(int(words.parent.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("name", TOYS)
def test_two_killed_processes_resume_to_the_same_bits(name: str, shard: str, two: Path, tmp_path: Path) -> None:
    """kill -9 of both and their launcher, in the middle of the run."""
    out = tmp_path / "run"
    kind = "shards" if shard == "full" else "safetensors"
    words = [sys.executable, *LAUNCHER, str(SCRIPT), str(out), name]
    process = subprocess.Popen([*words, "5", shard], env=CHILD, start_new_session=True)
    limit = time.monotonic() + PATIENCE
    try:
        while not (out / "checkpoints" / f"step-00000004.{kind}").exists():
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        kill_all(out)
        process.wait()
    subprocess.run([*words, "-1", shard], env=CHILD, check=True, timeout=PATIENCE)
    assert same(tensors(out), tensors(two / f"{name}-{shard}"))
    assert curve(out) == curve(two / f"{name}-{shard}")
