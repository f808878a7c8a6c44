"""Signals at any time: exit code 3, one sentence, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORDS = ["train", "digits", "--model", "deit_nano", "--recipe", "deit@small", "img_size=16", "workers=0", "epochs=500"]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["recipe.yaml", "log.jsonl"])
def test_training_ends_with_code_three_whenever_it_is_stopped(
    which: signal.Signals, moment: str, tmp_path: Path
) -> None:
    """Just after the folder was begun, when the loop is not running yet, and in the middle of training."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "patchloom", *WORDS, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.time() + 120
    while not (out / moment).exists():
        assert process.poll() is None
        assert time.time() < limit
        time.sleep(0.002)
    process.send_signal(which)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said[-800:]
    assert "Traceback" not in said
    assert said.strip()
