"""`patchloom models`, and what every command promises: exit codes, one sentence, no traceback."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import pytest

import patchloom


def run(*words: str, module: bool = True) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "patchloom"] if module else ["patchloom"]
    return subprocess.run([*start, *words], capture_output=True, text=True, timeout=120)


def rows(*words: str) -> list[dict]:
    done = run("models", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_table_is_quick_and_complete() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    table = rows()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10  # of computing, however busy the machine
    assert [row["name"] for row in table] == patchloom.list_models()
    for row in table:
        assert {"name", "params", "macs", "activations", "resolution", "family", "source"} <= set(row)
    (cait,) = (row for row in table if row["name"] == "cait_s24")
    assert (cait["params"], cait["macs"]) == (46916200, 9327327744)
    assert (cait["at_384"]["params"], cait["at_384"]["macs"]) == (47062120, 32110109184)
    assert "at_384" not in next(row for row in table if row["name"] == "deit3_huge")  # patches of 14 do not divide 384


def test_a_pattern_selects() -> None:
    assert {row["name"] for row in rows("cait_xxs*")} == {"cait_xxs24", "cait_xxs36"}
    assert [row["name"] for row in rows("vit_tiny_7x5")] == ["vit_tiny_7x5"]
    text = run("models", "cait_s*").stdout
    assert "cait_s24" in text
    assert "46.92M" in text
    assert "9.33G" in text
    assert "cait_m24" not in text


def test_the_table_begins_with_three_recommendations_and_names_published_weights() -> None:
    lines = run("models").stdout.splitlines()
    assert lines[0] == "recommended"
    assert {line.split()[0] for line in lines[1:4]} <= set(patchloom.list_models())
    assert lines[4] == ""
    assert "recommended" not in run("models", "deit_*").stdout
    assert "fb_in1k" in run("models", "deit_tiny").stdout
    tags = {row["name"]: row["weights"] for row in rows()}
    assert (tags["deit_tiny"], tags["deit_nano"]) == (["fb_in1k"], [])


def test_the_table_needs_no_timm() -> None:
    code = "import sys; from patchloom.cli.models import model_rows; model_rows('*'); print('timm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("models", "cait_xss24"), "cait_xxs24"),
        (("models", "nothing*"), "nothing*"),
        (("modles",), "modles"),
        ((), "COMMAND"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_2(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_debug_shows_the_traceback() -> None:
    done = run("models", "cait_xss24", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_and_version_are_quick() -> None:
    started = time.perf_counter()
    assert "models" in run("--help").stdout
    assert patchloom.__version__ in run("--version").stdout
    assert time.perf_counter() - started < 2  # torch is not imported


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(f"{sys.executable} -m patchloom models | head -1", shell=True, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
