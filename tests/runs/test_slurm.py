"""The submit helper, on submitit's local cluster: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchloom.runs.slurm import Launch, submit

pytest.importorskip("submitit", reason="submitit is not installed")
TINY = [
    "train", "digits", "--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "model.dim=24",
    "model.heads=2", "img_size=16", "batch_size=512", "workers=0", "epochs=1", "--out",
]  # fmt: skip


def test_a_submitted_command_trains_and_a_second_time_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = submit([*TINY, str(out)], cluster="local", folder=str(tmp_path / "slurm"))
    assert job.result() == 0
    assert (out / "report.html").exists()
    assert Launch([*TINY, str(out)])._now() == ["resume", str(out)]
    assert Launch([*TINY, str(tmp_path / "other")])._now()[0] == "train"
