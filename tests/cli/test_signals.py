"""Signals at any time: exit code 3, one sentence, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORDS = ["train", "digits", "--model", "deit_nano", "--recipe", "deit@small", "img_size=16", "workers=0", "epochs=500"]


def test_a_signal_to_the_whole_group_reaches_workers_too_and_nohup_is_obeyed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [word for word in WORDS if word != "workers=0"]
    command = [sys.executable, "-m", "patchloom", *words, "workers=2", "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    try:
        limit = time.time() + 120
        while not (out / "log.jsonl").exists():
            assert process.poll() is None
            assert time.time() < limit
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 3, said[-800:]
    assert "everything saved" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["recipe.yaml", "log.jsonl"])
def test_training_ends_with_code_three_whenever_it_is_stopped(
    which: signal.Signals, moment: str, tmp_path: Path
) -> None:
    """Just after the folder was begun, when the loop is not running yet, and in the middle of training, then as a shell
    starts what it puts into the background: with Ctrl-C ignored."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "patchloom", *WORDS, "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if moment == "log.jsonl" else signal.SIG_DFL),
    )  # fmt: skip
    limit = time.time() + 120
    while not (out / moment).exists():
        assert process.poll() is None
        assert time.time() < limit
        time.sleep(0.002)
    process.send_signal(which)
    try:
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 3, said[-800:]
    assert "Traceback" not in said
    assert said.strip()


def test_a_signal_in_code_that_python_executes_for_a_library(tmp_path: Path) -> None:
    """A KeyboardInterrupt that has once left `exec`, as in making a named tuple, ends `python -m` with SIGINT."""
    (tmp_path / "stopped.py").write_text("""
from patchloom.cli import main, models
models.run = lambda _: exec("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)")
main.main(["models"])
""")
    command = [sys.executable, "-m", "stopped"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "patchloom: stopped.\n")
