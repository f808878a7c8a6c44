"""Runs, exports and checkpoints of version 0.1.0 still resume and load: tests/reference/runs/0.1.0.tar."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from conftest import REFERENCE
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.runs.config import config_from_settings, settings_of
from patchloom.runs.launch import resume
from patchloom.tasks.classification.config import DistillationConfig
from patchloom.tasks.classification.plans import plan_training
from patchloom.training.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from curves import machine

QUIET = Console(quiet=True)
KINDS = ["trained", "distilled", "finetuned"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Three runs that a signal stopped half-way, a teacher, and how version 0.1.0 finished the runs."""
    with tarfile.open(REFERENCE / "runs" / "0.1.0.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    for file in (tmp_path / "old_run").glob("*/recipe.yaml"):
        file.write_text(file.read_text().replace("@HERE@", str(tmp_path / "old_run")))
    return tmp_path / "old_run"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_half_way_ends_as_its_own_version_ended_it(kind: str, old: Path) -> None:
    finish = json.loads((old / "finish.json").read_text())
    exact = all(machine()[name] == finish["made_with"][name] for name in ("processor", "torch", "numpy", "pillow"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = resume(old / kind, QUIET)
    finally:
        torch.set_num_threads(threads)
    want, got = finish["runs"][kind], {record["step"]: record for record in run.records()}
    assert list(got) == [record["step"] for record in want["log"]]
    for record in want["log"]:
        for key, value in record.items():
            tolerance = {"rel": 1e-5, "abs": 0.006 if "top" in key else 0}  # two of 359 images
            assert got[record["step"]][key] == (value if exact or key == "event" else pytest.approx(value, **tolerance))
    tensors = load_file(run.folder / "export" / "model.safetensors")
    assert tensors.keys() == want["weights"].keys()
    digests = {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16] for name, t in tensors.items()}
    assert not exact or digests == want["weights"]


def test_settings_are_written_under_the_names_of_this_version(old: Path) -> None:
    assert json.loads(line_of(old / "distilled", "teaching"))["how"] == "token"
    resume(old / "distilled", QUIET)
    assert json.loads(line_of(old / "distilled", "teaching"))["method"] == "token"
    resume(old / "distilled", QUIET)  # finished: compared with a checkpoint of this version
    file = old / "distilled" / "recipe.yaml"
    file.write_text(file.read_text().replace("\nseed: 11\n", "\nseed: 12\n"))
    with pytest.raises(PatchloomError, match="seed is 12, was 11"):
        resume(old / "distilled", QUIET)


def line_of(run: Path, key: str) -> str:
    (line,) = (line for line in (run / "recipe.yaml").read_text().splitlines() if line.startswith(f"{key}: "))
    return line.removeprefix(f"{key}: ")


def test_settings_without_the_fields_of_this_version_give_the_same_run() -> None:
    taught = DistillationConfig(("teacher",), "soft", tau=2.0)
    config = plan_training("digits", "deit_nano", "deit@small", {}, {"depth": 1}, distillation=taught)
    settings = settings_of(config)
    later = ("steps", "eval_every", "layer_decay", "weight_decay_end")
    written = {key: value for key, value in settings.items() if key not in later}
    written["teaching"] = {"how" if key == "method" else key: value for key, value in settings["teaching"].items()}
    again = config_from_settings(json.loads(json.dumps(written)))
    assert (again.task, again.recipe) == (config.task, config.recipe)


def test_checkpoints_and_exports_load(old: Path) -> None:
    """Of a run with an average, its averaged weights."""
    (newest,) = (old / "trained" / "checkpoints").glob("step-00000049.safetensors")
    tensors = load_file(newest)
    averaged = {name.removeprefix("ema."): t for name, t in tensors.items() if name.startswith("ema.")}
    loaded = patchloom.load(newest).state_dict()
    assert averaged
    assert loaded.keys() == averaged.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in averaged.items())
    teacher = patchloom.load(old / "teacher" / "export")
    assert teacher.class_names == tuple("0123456789")
    assert patchloom.evaluate(old / "teacher" / "export", "digits")["loss"] == pytest.approx(2.2072347, rel=1e-4)
    assert Run.open(old / "trained").settings["recipe_name"] == "deit@small"
