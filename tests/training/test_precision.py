"""A precision that the machine does not bear is found out by a child process, and refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.training import precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    precision.why_not.cache_clear()
    yield
    precision.why_not.cache_clear()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os; os.kill(os.getpid(), 4)", "kills the process on this machine (SIGILL"),
        ("raise RuntimeError('no {dtype}')", "fails on this machine (RuntimeError: no bfloat16)"),
        ("import sys; sys.exit(3)", "fails on this machine (no message)"),
        ("import time; time.sleep(60)", "gives no result within 1 seconds"),
    ],
)
def test_what_a_child_does_not_survive_is_refused(program: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_PROBE", program)
    monkeypatch.setattr(precision, "_PATIENCE", 1 if "sleep" in program else 60)
    assert not precision.survives("bf16")
    with pytest.raises(PatchloomError) as refused:
        precision.check_precision("bf16", CPU)
    assert told in str(refused.value)
    precision.check_precision("float32", CPU)


def test_the_child_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_PROBE", "pass")
    assert precision.survives("bf16")
    monkeypatch.setattr(precision, "_PROBE", "raise SystemExit(1)")
    assert precision.survives("bf16")
    precision.check_precision("bf16", CPU)
