"""What `train` accepts beside a dataset and a module of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchloom
from patchloom.console import Console
from patchloom.errors import PatchloomError


class Numbers:
    """Entry i is four random numbers and the class i % 2."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 2


def start(out: Path, console: Console | None = None, **options: Any) -> Any:
    fixed = {"recipe": "deit@small", "epochs": 1, "batch_size": 4, "workers": 0, "device": "cpu"}
    console = console or Console(quiet=True)
    return patchloom.train(Numbers(), model=nn.Linear(4, 2), out=out, console=console, **{**fixed, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "train"}, "train_split"),
        ({"test_split": "val"}, "test_split"),
        ({"labels": "species"}, "labels"),
        ({"validation": Numbers(6), "hold_out": 0.5}, "hold_out"),
    ],
)
def test_what_has_no_effect_on_a_dataset_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=f"{message}.* no effect"):
        start(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_said_to_be_so_without_a_command_that_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run")
    start(tmp_path / "run", Console())
    said = capsys.readouterr().out
    assert "is already finished (1 epoch). Nothing was changed.\n" in said
    assert "patchloom extend" not in said
