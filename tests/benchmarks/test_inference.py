"""The benchmark measures equal networks in turn, and its comparison with an earlier run can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "inference.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARK), *words], capture_output=True, text=True, timeout=1200)


def test_it_measures_both_sides_and_notices_a_slowdown(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    quick = ("--batch", "1", "--rounds", "2", "--no-memory")
    done = run("--models", "deit_tiny", "patchconvnet_s60", *quick, "--json", str(kept))
    assert done.returncode == 0, done.stderr[-1000:]
    rows = json.loads(kept.read_text())["rows"]
    assert [row["model"] for row in rows] == ["deit_tiny", "patchconvnet_s60"]
    for row in rows:
        assert row["difference"] < 1e-5, "the two networks are not the same function"
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    again = ("--models", "deit_tiny", *quick, "--compare", str(kept))
    easy = {"ratio": 0.1, "latency_ratio": 0.1, "ours": {"share": 0.01}}
    kept.write_text(json.dumps({"rows": [{**rows[0], **easy}]}))
    assert run(*again).returncode == 0
    kept.write_text(json.dumps({"rows": [{**rows[0], "ratio": 100.0}]}))
    done = run(*again)
    assert done.returncode != 0
    assert "worse than recorded" in done.stderr


def test_the_peak_of_a_process_is_its_own() -> None:
    """Not that of a larger process that has started it, as `ru_maxrss` can be."""
    child = "from patchloom.benching.inference import megabytes; print(megabytes('VmHWM'))"
    parent = f"""
import subprocess, sys
ballast = bytearray(b"x") * 2**30
print(subprocess.run([sys.executable, "-c", {child!r}], check=True, capture_output=True, text=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=120)
    assert 1 < float(done.stdout) < 1000
