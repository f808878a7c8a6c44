"""Choosing a device on a machine without an accelerator; tests/devices has a machine with one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from patchloom.devices import (
    available_devices,
    choose_device,
    device_name,
    device_of,
    pins_memory,
    process_backend,
    supports,
    to_device,
)
from patchloom.errors import PatchloomError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["auto", None, "cpu", CPU, "cpu:0"])
def test_without_an_accelerator_every_choice_is_the_cpu(name: str | torch.device | None) -> None:
    assert choose_device(name) == CPU
    assert available_devices() == ["cpu"]


@pytest.mark.parametrize(
    "name", ["gpuu", "cuda", "cuda:7", "mps", "xpu:1", "meta", "", "cpu:x", "cpu:7", "cuda:-1", "auto:1"]
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(PatchloomError, match="Choose from: auto, cpu"):
        choose_device(name)


def test_a_misspelt_device_gets_a_suggestion() -> None:
    with pytest.raises(PatchloomError, match="Did you mean 'cpu'"):
        choose_device("cpuu")


def accelerators(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)


@pytest.mark.parametrize(
    ("name", "local_rank", "expected"),
    [
        ("auto", None, "xpu:1"),  # the current one
        ("xpu", None, "xpu:1"),
        ("xpu:0", None, "xpu:0"),
        ("auto", "3", "xpu:3"),
        ("xpu", "2", "xpu:2"),
        ("xpu:0", "3", "xpu:0"),
        ("cpu", "3", "cpu"),
    ],
)
def test_a_process_of_torchrun_takes_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, name: str, local_rank: str | None, expected: str
) -> None:
    accelerators(monkeypatch, 4, current=1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert choose_device(name) == torch.device(expected)


def test_more_processes_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(PatchloomError, match=r"auto, cpu, xpu:0, xpu:1.*torchrun started 3 processes"):
        choose_device("auto")


def test_processes_on_the_cpu_join_by_gloo_and_unknown_devices_are_refused() -> None:
    assert process_backend(CPU) == "gloo"
    with pytest.raises(PatchloomError, match="--device cpu"):
        process_backend(torch.device("ipu"))


def test_what_a_device_can_do_is_found_by_trying() -> None:
    assert supports(CPU, torch.float64)
    assert supports(CPU, torch.bfloat16)
    assert not supports(torch.device("cuda", 0), torch.float32) or torch.cuda.is_available()
    assert not pins_memory(CPU)
    assert device_name(CPU) == "cpu"
    assert device_of(torch.nn.Linear(1, 1)) == device_of(torch.nn.ReLU()) == CPU


class Pair(NamedTuple):
    one: torch.Tensor
    other: object


def test_nested_structures_move_with_their_types() -> None:
    x = torch.arange(3.0)
    batch = {"pair": Pair(x, "text"), "rows": [x, (x, None)], "count": 3}
    moved = to_device(batch, torch.device("meta"))
    assert list(moved) == ["pair", "rows", "count"]
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].other == "text"
    assert moved["count"] == 3
    rows = moved["rows"]
    assert isinstance(rows, list)
    assert isinstance(rows[1], tuple)
    assert rows[1][1] is None
    assert all(tensor.is_meta for tensor in (moved["pair"].one, rows[0], rows[1][0]))
    assert to_device(x, CPU) is x
