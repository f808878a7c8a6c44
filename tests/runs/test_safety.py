"""Nothing is lost and nothing overwritten: images that vanish, runs that are finished, edited or begun twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patchloom import create_model, save
from patchloom.api import train
from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.errors import InterruptedWork, PatchloomError
from patchloom.recipes.registry import find_recipe
from patchloom.runs import launch as launch_module
from patchloom.runs.launch import resume
from patchloom.tasks.classification import setup
from patchloom.tasks.classification.task import Classification
from patchloom.temporary import own_name
from patchloom.training import run as run_module
from patchloom.training.loop import Loop
from patchloom.training.machine import packages

QUIET = {"console": Console(quiet=True)}
TINY = {
    "model": "deit_nano", "recipe": "deit@small", "model_options": {"depth": 1, "dim": 24, "heads": 2},
    "resolution": 16, "batch_size": 16, "epochs": 2, "workers": 0, **QUIET,
}  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    digits = open_source("digits")
    for i, item in enumerate(digits.splits["train"][:60]):
        path = tmp_path / "photos" / ("val" if i >= 48 else "train") / str(i % 2) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digits.read(item).save(path)
    return tmp_path / "photos"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("moment", ["evaluate", "scores", "finish"])
def test_a_held_out_image_that_vanishes_costs_nothing(
    moment: str, workers: int, photos: Path, tmp_path: Path, monkeypatch
) -> None:
    """In the first evaluation, in the last one, or in the scoring for the report of a run that was cut before it."""
    train(photos, out=tmp_path / "whole", **TINY)
    lost, hidden = photos / "val" / "0" / "50.png", tmp_path / "hidden.png"
    real, calls = getattr(Classification, moment), []

    def losing(self: Classification, *arguments):
        calls.append(moment)
        if len(calls) == (2 if moment == "scores" else 1):
            self._scored = None  # else the report has the scores of the last evaluation
            lost.rename(hidden)
        return real(self, *arguments)

    monkeypatch.setattr(Classification, moment, losing)
    step = 3 if moment == "evaluate" else 6
    with pytest.raises(
        PatchloomError, match=rf"stopped at step {step}, everything saved: .*50\.png .*resume"
    ) as caught:
        train(photos, out=tmp_path / "run", **{**TINY, "workers": workers})
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / "checkpoints" / f"step-0000000{step}.safetensors").exists()
    monkeypatch.undo()
    hidden.rename(lost)
    resume(tmp_path / "run", **QUIET)
    whole, got = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(got[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("name", ["report.html", "export/model.safetensors", "export/model.json"])
def test_a_full_disk_at_the_end_of_a_run_costs_nothing(name: str, photos: Path, tmp_path: Path) -> None:
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    own_name(place).symlink_to("/dev/full")  # where the file is written first
    message = r"stopped at step 6, everything saved: .*No space left on device.*resume"
    with pytest.raises(PatchloomError, match=message) as caught:
        train(photos, out=tmp_path / "run", **TINY)
    assert caught.value.exit_code == 1
    resume(tmp_path / "run", **QUIET)
    assert (tmp_path / "run" / "export" / "model.json").exists()


def test_a_full_disk_is_told_from_a_wrong_folder_when_a_run_begins(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    own_name(tmp_path / "run" / "recipe.yaml").symlink_to("/dev/full")
    with pytest.raises(PatchloomError, match=r"cannot be written: .*No space left on device") as caught:
        train(photos, out=tmp_path / "run", **TINY)
    assert caught.value.exit_code == 1


def test_a_nul_byte_in_the_name_of_a_folder_or_file_is_refused() -> None:
    with pytest.raises(PatchloomError, match="NUL byte"):
        train("digits", out="a\0b", **TINY)
    with pytest.raises(PatchloomError, match=r"not 'a\\x00b\.safetensors'"):
        save(create_model("deit_nano", depth=1), "a\0b.safetensors")


def test_a_signal_between_accumulated_parts_ends_a_step_that_leaves_no_trace(
    photos: Path, tmp_path: Path, monkeypatch
) -> None:
    options = {**TINY, "accumulate": 4, "model_options": {**TINY["model_options"], "stem": "hmlp"}}
    train(photos, out=tmp_path / "whole", **options)
    real, calls = Classification.losses, []

    def stopping(self: Classification, batch, step: int, part: int):
        calls.append((step, part))
        if (step, part) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch, step, part)

    monkeypatch.setattr(Classification, "losses", stopping)
    with pytest.raises(InterruptedWork, match="step 1 of 6"):
        train(photos, out=tmp_path / "run", **options)
    assert calls == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    monkeypatch.undo()
    resume(tmp_path / "run", **QUIET)
    whole, got = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(got[name], tensor) for name, tensor in whole.items())


def test_a_command_in_a_message_can_be_pasted(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    (out / "checkpoints").mkdir(parents=True)
    with pytest.raises(PatchloomError, match=f"`patchloom resume '{out}'`"):
        train(photos, out=out, **TINY)


def test_resuming_a_finished_run_says_so_and_changes_no_byte(photos: Path, tmp_path: Path, capsys) -> None:
    train(photos, out=tmp_path / "run", **TINY)
    before = contents(tmp_path / "run")
    resume(tmp_path / "run", Console())
    assert "is already finished (2 epochs)" in capsys.readouterr().out
    assert contents(tmp_path / "run") == before


def test_an_edited_recipe_is_refused_and_other_versions_are_told(
    photos: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    out = tmp_path / "run"
    train(photos, out=out, **TINY)
    path = out / "recipe.yaml"
    original = path.read_text()
    path.write_text(original.replace("\nweight_decay: 0.05\n", "\nweight_decay: 0.31\n"))
    with pytest.raises(PatchloomError, match=r"weight_decay is 0\.31, was 0\.05"):
        resume(out, **QUIET)
    path.write_text(original.replace("\nworkers: 0\n", "\nworkers: 1\n"))
    resume(out, **QUIET)
    monkeypatch.setattr(launch_module, "packages", lambda: {**packages(), "torch": "9.9"})
    resume(out, Console())
    assert "torch 9.9 (was " in capsys.readouterr().out


def test_an_extension_that_was_cut_before_its_first_step_can_be_resumed(
    photos: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "run"
    train(photos, out=out, **TINY)
    for place in ("renew", "fit"):  # before recipe.yaml has the new epochs, and after
        with monkeypatch.context() as patch:
            patch.setattr(run_module.Run if place == "renew" else Loop, place, _cut)
            with pytest.raises(KeyboardInterrupt):
                resume(out, **QUIET, more_epochs=1)
        resume(out, **QUIET)
    assert len(run_module.Run.open(out).records()) == 3


def _cut(_: object) -> None:
    raise KeyboardInterrupt


def test_a_run_begun_meanwhile_is_not_overwritten(photos: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run"
    real = setup.open_images

    def slow(*arguments, **options):
        monkeypatch.undo()
        train(photos, out=out, **{**TINY, "epochs": 1})
        return real(*arguments, **options)

    monkeypatch.setattr(setup, "open_images", slow)
    with pytest.raises(PatchloomError, match="holds a run already"):
        train(photos, out=out, **{**TINY, "seed": 9})
    assert run_module.Run.open(out).settings["seed"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 100_000}, "'workers' .* from 0 to 512, not 100000"),
        ({"epochs": 10**21}, "'epochs' .* from 1 to 1000000, not 10{21}"),
        ({"model_options": {"depth": 10**6}}, "'depth' .* from 1 to 1000, not 1000000"),
    ],
)
def test_absurd_values_are_refused_with_the_limit(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=message):
        train("digits", out=tmp_path / "run", **{**TINY, **changes})
    with pytest.raises(PatchloomError, match="epochs"):
        find_recipe("deit").replace(epochs=10**7)


def test_an_absurd_range_of_shards_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="names 1000000000 shards: at most 100000"):
        open_source(f"wds:{tmp_path}/a-{{000000000..999999999}}.tar")
