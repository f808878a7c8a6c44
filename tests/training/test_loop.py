"""How long a run is, when it is evaluated, and what its log says of the losses: with a task of one small layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.training.callbacks import Callback
from patchloom.training.loop import Loop
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate, weight_decay
from patchloom.training.task import Task

BATCH = 8


class Line(Task):
    """A line through noisy points, with two losses."""

    steps_per_epoch = 4

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = nn.ModuleDict({"model": nn.Linear(3, 2)})

    def batches(self, start: int, end: int) -> Generator[Any, None, None]:
        for step in range(start, end):
            generator = torch.Generator().manual_seed(step)
            yield {"x": torch.randn(BATCH, 3, generator=generator), "y": torch.randn(BATCH, 2, generator=generator)}

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        error = self.modules["model"](batch["x"]) - batch["y"]
        return {"square": error.square().sum(dim=-1), "absolute": 0.5 * error.abs().sum()}

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        return {"norm": modules["model"].weight.norm().item()}


class Noted(Callback):
    """The losses of every step, and the records of the log."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.records: list[Mapping[str, Any]] = []

    def after_step(self, step: int, losses: Mapping[str, float]) -> None:
        self.steps.append(losses)
        assert step == len(self.steps)

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)


def loop(folder: Path, callbacks: tuple[Callback, ...] = (), **changes: Any) -> Loop:
    recipe = Recipe(**{"name": "toy", "epochs": 5, "batch_size": BATCH, "warmup_epochs": 0.0, **changes})
    folder.mkdir(exist_ok=True)
    return Loop(Line(), recipe, Run(folder, {}), Processes(), Console(quiet=True), callbacks)


@pytest.mark.parametrize(
    ("changes", "steps", "epochs"),
    [
        ({}, [4, 8, 12, 16, 20], [1, 2, 3, 4, 5]),
        ({"eval_every": "2 epochs"}, [8, 16, 20], [2, 4, 5]),  # the end is always evaluated
        ({"eval_every": "7"}, [7, 14, 20], [1.75, 3.5, 5]),
        ({"eval_every": "7 steps"}, [7, 14, 20], [1.75, 3.5, 5]),
        ({"eval_every": "100"}, [20], [5]),
        ({"steps": 30}, [4, 8, 12, 16, 20, 24, 28, 30], [1, 2, 3, 4, 5, 6, 7, 7.5]),
        ({"steps": 3}, [3], [0.75]),
        ({"steps": 30, "eval_every": "20"}, [20, 30], [5, 7.5]),
    ],
)
def test_a_run_is_evaluated_at_its_intervals_and_at_its_end(
    changes: dict, steps: list[int], epochs: list[float], tmp_path: Path
) -> None:
    noted = Noted()
    loop(tmp_path, (noted,), **changes).fit()
    records = Run(tmp_path, {}).records()
    assert records == noted.records
    assert [record["step"] for record in records] == steps
    assert [record["epoch"] for record in records] == epochs
    assert len(noted.steps) == steps[-1]


@pytest.mark.parametrize("changes", [{}, {"eval_every": "7"}, {"accumulate": 4}])
def test_losses_are_logged_by_name_and_sum_to_the_training_loss(changes: dict, tmp_path: Path) -> None:
    noted = Noted()
    loop(tmp_path, (noted,), **changes).fit()
    begin = 0
    for record in noted.records:
        part = noted.steps[begin : record["step"]]  # since the last evaluation
        means = {name: sum(losses[name] for losses in part) / len(part) for name in ("square", "absolute")}
        assert record["losses"] == pytest.approx(means, rel=1e-6)
        assert sum(record["losses"].values()) == pytest.approx(record["train_loss"], rel=1e-6)
        begin = record["step"]


def test_a_task_may_have_its_start_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "evaluates_start", True)
    noted = Noted()
    whole = loop(tmp_path, (noted,))
    norm = whole.task.modules["model"].weight.norm().item()
    whole.fit()
    first, second, *_ = noted.records
    assert (first["step"], first["epoch"], first["norm"]) == (0, 0, norm)
    assert {"lr", "train_loss", "losses"}.isdisjoint(first)
    assert (second["step"], second["train_loss"] > 0) == (4, True)
    state = whole.state()
    resumed = loop(tmp_path / "again", epochs=6)
    resumed.restore(state)
    resumed.fit()
    assert [record["step"] for record in Run(tmp_path / "again", {}).records()] == [24]


def test_a_parameter_without_its_gradient_is_left_out_of_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def freeze(task: Line, step: int) -> None:
        bias = task.modules["model"].bias
        assert bias.grad is not None
        if step < 8:
            bias.grad = None

    monkeypatch.setattr(Line, "after_backward", freeze)
    frozen = loop(tmp_path)
    bias = frozen.task.modules["model"].bias
    start = bias.detach().clone()
    for i, batch in enumerate(frozen.task.batches(0, 10)):
        frozen.step(batch)
        assert torch.equal(bias, start) == (i < 8)


def test_sums_of_losses_survive_a_checkpoint(tmp_path: Path) -> None:
    """An interval that is cut in the middle logs the means of all its steps."""
    loop(tmp_path / "straight", eval_every="7").fit()
    whole = loop(tmp_path / "cut", eval_every="7")
    for batch in whole.task.batches(0, 3):
        whole.step(batch)
    state = whole.state()
    resumed = loop(tmp_path / "cut", eval_every="7")
    resumed.restore(state)
    resumed.fit()
    logs = [Run(tmp_path / name, {}).records() for name in ("straight", "cut")]
    for want, got in zip(*logs, strict=True):
        assert {key: got[key] for key in ("step", "train_loss", "losses", "norm")} == {
            key: want[key] for key in ("step", "train_loss", "losses", "norm")
        }


def test_an_evaluation_by_the_clock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"eval_every is a number of epochs .*'30s'"):
        loop(tmp_path, eval_every="30s")


def test_the_rate_of_a_run_in_steps_reaches_its_end_with_the_last_step() -> None:
    recipe = Recipe(name="t", steps=30, epochs=300, lr=1e-2, min_lr=1e-4, warmup_epochs=0.0)
    for step in range(30):
        want = 1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * step / 30)) / 2
        assert learning_rate(recipe, step, 4) == pytest.approx(want, rel=1e-12)


def test_a_short_run_in_steps_keeps_the_warm_ups_share() -> None:
    """5 of 60 epochs are a twelfth of the run: 2.5 of 30 steps, though an epoch has 22."""
    recipe = Recipe(name="t", steps=30, epochs=60, lr=1e-2, min_lr=0.0, warmup_lr=0.0, warmup_epochs=5.0)
    assert learning_rate(recipe, 2, 22) == pytest.approx(1e-2 * 2 / 2.5)
    assert learning_rate(recipe, 3, 22) == pytest.approx(1e-2 * (1 + math.cos(math.pi * 3 / 30)) / 2)
    long = recipe.replace(steps=22 * 30)
    assert learning_rate(long, 55, 22) == pytest.approx(1e-2 * 2.5 / 5)  # time for all of it


def test_weight_decay_goes_along_a_cosine_for_matrices_alone(tmp_path: Path) -> None:
    seen: list[dict[bool, float]] = []

    class Decays(Callback):
        def after_step(self, step: int, losses: Mapping[str, float]) -> None:
            seen.append({group["decays"]: group["weight_decay"] for group in fitted.optimizer.param_groups})

    fitted = loop(tmp_path, (Decays(),), weight_decay=0.04, weight_decay_end=0.4, min_lr=0.0)
    fitted.fit()
    for step, decays in enumerate(seen):
        want = 0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * step / 20)) / 2
        assert decays == {True: pytest.approx(want, rel=1e-12), False: 0.0}
        assert weight_decay(fitted.recipe, step, 20) == pytest.approx(want, rel=1e-12)


def test_weight_decay_that_begins_at_zero_still_grows(tmp_path: Path) -> None:
    fitted = loop(tmp_path, weight_decay=0.0, weight_decay_end=0.2)
    fitted.fit()
    assert max(group["weight_decay"] for group in fitted.optimizer.param_groups) > 0.19


def test_gradient_checkpointing_is_refused_where_no_module_has_it(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="gradient_checkpointing=true has no effect: no module of Line"):
        loop(tmp_path, gradient_checkpointing=True)
