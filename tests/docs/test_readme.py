"""The README: its figures are those of the pages of results, its commands exist, and so do those after the demo."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import patchloom
from patchloom.cli.main import _parser
from patchloom.console import Console

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [README, HOME], ids=["README", "home page"])
def test_its_figures_are_those_of_the_results(page: str) -> None:
    figures = re.findall(r"\[([\d.]+)[^\]]*\]\((?:docs/)?(results/\w+\.md)\)", page)
    assert {name for _, name in figures} >= {"results/finetuning.md", "results/inference.md"}
    for figure, name in figures:
        assert f" {figure} " in (ROOT / "docs" / name).read_text(), f"{figure} is not in {name}"


def test_every_file_that_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", README) + re.findall(r'src="([^"]+)"', README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_fine_tuning_comes_before_training_from_scratch_and_after_the_make_commands() -> None:
    assert README.index("make demo") < README.index("patchloom finetune")
    assert "patchloom train " not in README.split("patchloom finetune")[0]


@pytest.mark.parametrize("page", [README, HOME], ids=["README", "home page"])
def test_its_commands_are_understood(page: str) -> None:
    blocks = re.findall(r"```console\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"(\.venv/bin/)?patchloom ", line)]
    assert len(lines) >= 3
    for line in lines:
        _parser().parse_args(shlex.split(line, comments=True)[1:])


def test_what_the_demo_prints_works_as_written(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)  # the environment of the tests, where `make demo` has its own
    patchloom.train(
        "digits", model="deit_nano", recipe="deit@small", out=tmp_path / "run", console=Console(quiet=True), workers=0,
        model_options={"depth": 1}, resolution=16, epochs=1,
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    demo = [".venv/bin/python", str(ROOT / "examples" / "classify_digit.py"), "run"]
    done = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [line.split()[:2] for line in lines] == [
        [".venv/bin/patchloom", name] for name in ("predict", "serve", "finetune")
    ]
    predicted = subprocess.run(lines[0], shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert predicted.returncode == 0, predicted.stderr
    assert "digit.png" in predicted.stdout
    for line in lines[1:]:
        _parser().parse_args(shlex.split(line, comments=True)[1:])
    assert "source .venv/bin/activate" in done.stdout
