"""Every family and every kind of run gives the loss curve that was recorded, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from curves import CASES, FOLDER, STEPS, curve, machine


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over threads round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_the_curve_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    exact = recorded.pop("made_with") == machine()
    found = curve(name, tmp_path)
    assert found.keys() == recorded.keys()
    assert len(found["train_loss"]) == STEPS
    for key, values in recorded.items():
        assert found[key] == (values if exact else pytest.approx(values, rel=1e-5))


def test_a_curve_is_recorded_for_every_case() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(CASES)
