"""Wrong parts of a user's own, and tasks that break the contract: one PatchloomError that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import patchloom
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.training.task import first_tensor

INPUTS = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
PAIRS = [(x, i % 2) for i, x in enumerate(INPUTS)]
SETTINGS: dict[str, Any] = {"recipe": "deit@small", "batch_size": 4, "workers": 0, "device": "cpu", "epochs": 1}


def train(out: Path, data: Any = PAIRS, model: Any = None, **changes: Any) -> Any:
    model = model or nn.Linear(8, 2)
    return patchloom.train(data, model=model, out=out, console=Console(quiet=True), **{**SETTINGS, **changes})


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda outputs, targets: outputs.detach().sum(), "no gradient"),
        (lambda outputs, targets: outputs[:2, 0], r"shape \(2,\); it must return .* of shape \(4,\)"),
        (lambda outputs, targets: outputs, r"shape \(4, 2\)"),
        (lambda outputs: outputs.sum(), "The loss, called with .* raised TypeError"),
        (lambda outputs, targets: {"a": outputs.sum()}, "returns dict"),
    ],
)
def test_wrong_losses(loss: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        train(tmp_path / "run", loss=loss)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("cat", r"targets a list of 4 values, raised TypeError"),
        (None, "targets NoneType, raised TypeError"),
        (7, "raised IndexError: Target 7 is out of bounds"),
        (0.5, r"targets a float32 tensor of shape \(4,\), raised"),
    ],
)
def test_targets_that_cross_entropy_does_not_take(target: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        train(tmp_path / "run", [(x, target) for x in INPUTS])


@pytest.mark.parametrize("target", ["cat", None])
def test_a_loss_may_ignore_targets_of_any_kind(target: Any, tmp_path: Path) -> None:
    run = train(tmp_path / "run", [(x, target) for x in INPUTS], loss=lambda outputs, _: outputs.square().mean())
    assert run.records()[-1]["count"] == 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(9, 2), r"The model, called with a float32 tensor of shape \(4, 8\), raised RuntimeError"),
        (nn.Identity(), "nothing to train"),
        (nn.Linear(8, 2).requires_grad_(False), "nothing to train"),
        (nn.LazyLinear(2), "parameters without values"),
        (nn.Linear(8, 2, device="meta"), "parameters without values"),
    ],
)
def test_wrong_modules(model: nn.Module, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        train(tmp_path / "run", model=model)


class Failing:
    """A dataset whose entries cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        raise KeyError("lost")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_names_the_entry(workers: int, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"Entry \d+ of the dataset raised KeyError: 'lost'"):
        train(tmp_path / "run", Failing(), workers=workers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"callbacks": None}, "callbacks is a list"),
        ({"callbacks": patchloom.Callback()}, "callbacks is a list"),
        ({"labels": "labels.csv"}, "have no effect with a dataset"),
        ({"test_split": "val"}, "have no effect with a dataset"),
        ({"labels": np.ones(2)}, "have no effect with a dataset"),
        ({"test_split": 3}, "test_split is the name of a split, not int"),
        ({"hold_out": []}, "a fraction between 0 and 1, not"),
        ({"hold_out": object()}, "a fraction between 0 and 1, not"),
    ],
)
def test_arguments_without_a_meaning(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        train(tmp_path / "run", **changes)


@pytest.mark.parametrize("console", [3, "quiet", Console])
def test_a_console_is_a_console(console: Any, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"console is a .*Console, not"):
        patchloom.train(PAIRS, model=nn.Linear(8, 2), out=tmp_path / "run", console=console, **SETTINGS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", [None, 3])
def test_out_is_a_path(out: Any) -> None:
    with pytest.raises(PatchloomError, match="out is the path of a folder"):
        train(out)


class Line(patchloom.Task):
    """A task that is right; the tests break one member each."""

    metric: Any = patchloom.Metric("error", higher_is_better=False)

    def __init__(self) -> None:
        self.modules = nn.ModuleDict({"model": nn.Linear(8, 1)})
        self.steps_per_epoch = 3

    def batches(self, start: int, end: int) -> Any:
        for step in range(start, end):
            yield INPUTS[step % 3 * 4 : step % 3 * 4 + 4]

    def losses(self, batch: Any, step: int, part: int) -> Any:
        return {"squared": self.modules["model"](batch)[:, 0].square()}

    def evaluate(self, modules: nn.ModuleDict, after_batch: Any) -> Any:
        return {"error": float(F.mse_loss(modules["model"](INPUTS)[:, 0], INPUTS.sum(dim=1)).detach())}


def broken(**members: Any) -> patchloom.Task:
    return type("Broken", (Line,), members)()


def fit(task: Any, out: Path) -> Any:
    return patchloom.fit(
        task, out=out, recipe="old_fashioned@small", epochs=1, device="cpu", console=Console(quiet=True)
    )


def test_the_task_is_right(tmp_path: Path) -> None:
    assert "error" in fit(Line(), tmp_path / "run").records()[-1]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"__init__": lambda self: None}, "does not set modules"),
        ({"losses": patchloom.Task.losses}, "does not define the method losses"),
        ({"trained": "model"}, r"tuple of names, \('model',\)"),
        ({"batches": lambda self, start, end: iter([INPUTS])}, "must be a generator"),
        ({"losses": lambda *_: {}}, "must return a dict of tensors"),
        ({"losses": lambda *_: {"a": 1.0}}, "float under 'a'"),
        ({"losses": lambda *_: {"a": INPUTS[:, 0]}}, "no gradient"),
        ({"evaluate": lambda *_: None}, "returns NoneType; it must return a dict"),
        ({"evaluate": lambda *_: {"error": torch.ones(())}}, "JSON cannot hold"),
        ({"evaluate": lambda *_: {"eror": 1.0}}, "metric 'error' .* not among .*: eror"),
        ({"evaluate": lambda *_: {"error": None}}, "metric 'error' .* not among .*: there is none"),
        ({"evaluate": lambda *_: {"error": 1.0, 3: 1.0}}, "a metric called 3"),
        ({"evaluate": lambda *_: {"error": 1.0, "step": 1.0}}, "a metric called 'step'"),
        ({"evaluate": lambda self, modules: {}}, r"evaluate of the task Broken takes \(modules, after_batch\)"),
        ({"losses": lambda self, batch, step: {}}, r"losses of the task Broken takes \(batch, step, part\)"),
        ({"after_step": lambda self: None}, r"after_step of the task Broken takes \(step\)"),
        ({"losses": lambda *_: {1: INPUTS}}, "has the name 1; it must be a text"),
        ({"losses": lambda *_: {"a": torch.ones(1, dtype=torch.complex64)}}, "a tensor of real numbers"),
        ({"metric": "error"}, "metric of the task Broken is a patchloom.Metric, not 'error'"),
        ({"trained": (1,)}, "trained of the task Broken is a tuple of names, and one of them is not a string"),
        ({"trained": None}, "trained of the task Broken is a tuple of names, not NoneType"),
        ({"unit": None}, "unit of the task Broken is a word"),
        ({"state": lambda _: None}, "state of the task Broken returns NoneType, not a dict"),
        ({"state": lambda _: {"m": [1, 2]}}, r"state\.m is a list of 2 values"),
        ({"state": lambda _: {"m": np.zeros(3)}}, r"holds tensors; state\.m is"),
        ({"state": lambda _: {"m": torch.zeros(3, dtype=torch.complex64)}}, r"state\.m, a tensor of complex64"),
        ({"state": lambda _: {"m": torch.zeros(3, 3).to_sparse()}}, r"state\.m, a tensor of sparse_coo"),
        ({"metadata": lambda _: None}, "metadata .* returns NoneType"),
        ({"metadata": lambda _: {"m": torch.zeros(1)}}, "metadata .* JSON cannot hold"),
        ({"environment": lambda _: {"data": {1, 2}}}, "environment .* JSON cannot hold"),
        ({"environment": lambda _: {}}, "environment .* no dict under 'data'"),
        ({"weight": lambda *_: None}, "weight of the task Broken returns None"),
        ({"weight": lambda *_: torch.ones(3)}, r"weight of the task Broken returns tensor\("),
        ({"weight": lambda *_: -1.0}, r"weight of the task Broken returns -1\.0"),
    ],
)
def test_wrong_tasks(members: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        fit(broken(**members), tmp_path / "run")


@pytest.mark.parametrize("steps", [np.int64(3), 3.0, "3"])
def test_steps_per_epoch_is_an_int(steps: Any, tmp_path: Path) -> None:
    task = Line()
    task.steps_per_epoch = steps
    with pytest.raises(PatchloomError, match=r"it must be a Python int\."):
        fit(task, tmp_path / "run")


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"n": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WithExtraState(8, 2), r"holds tensors; model\._extra_state is dict"),
        (Complex(), r"cannot hold model\.weight, a tensor of complex64"),
    ],
)
def test_a_module_that_no_checkpoint_can_hold_is_refused_before_training(
    model: nn.Module, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PatchloomError, match=reason):
        train(tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


INTEGERS = (torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64)


def test_a_task_may_keep_integers_of_any_type_and_describe_its_data_with_tuples(tmp_path: Path) -> None:
    def make() -> patchloom.Task:
        task = broken(
            state=lambda self: self.kept,
            environment=lambda _: {"data": {"sizes": (1, 2)}},
            weight=lambda _, x: x.sum() * 0 + 4,
        )
        task.kept = {str(dtype): torch.arange(3).to(dtype) for dtype in INTEGERS}  # type: ignore[attr-defined]
        return task

    run = fit(make(), tmp_path / "run")
    (run.folder / "export" / "model.json").unlink()  # as if it was killed before the export
    again = make()
    for tensor in again.kept.values():  # type: ignore[attr-defined]
        tensor.zero_()
    fit(again, tmp_path / "run")
    assert all(tensor.tolist() == [0, 1, 2] for tensor in again.kept.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("out", [None, 3])
def test_fit_takes_a_path_too(out: Any) -> None:
    with pytest.raises(PatchloomError, match="out is the path of a folder"):
        fit(Line(), out)


@pytest.mark.parametrize("batch", ["text", {"a": ["text"]}, None, torch.ones(()), []])
def test_batches_that_cannot_be_counted(batch: Any) -> None:
    with pytest.raises(PatchloomError, match="cannot be counted"):
        first_tensor(batch)


@pytest.mark.parametrize("change", [{"mixup": 0.1}, {"drop_path": 0.1}, {"resolution": 32}])
def test_settings_that_a_task_of_ones_own_does_not_read_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=f"{next(iter(change))} has no effect with a task of your own"):
        patchloom.fit(Line(), out=tmp_path / "run", recipe="deit@small", device="cpu", **change)
