"""A run: folder, log, export, report; cut anywhere and resumed, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom import PatchloomError
from patchloom.api import train
from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.errors import InterruptedWork, StoppedError
from patchloom.runs.launch import resume
from patchloom.runs.plan import measure_plan
from patchloom.tasks.classification.plan import plan_lines
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.classification.task import Classification
from patchloom.training.loop import Loop
from patchloom.training.precision import survives, why_not
from patchloom.training.run import Run

QUIET = {"console": Console(quiet=True)}
TINY = {"model": "deit_nano", "recipe": "deit@small", "model_options": {"depth": 1, "dim": 24, "heads": 2}}
EVERYTHING = {
    "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25, "repeated_augmentation": 3, "drop_path": 0.2, "ema": 0.9,
    "augmentation": "rand", "resolution": 16, "batch_size": 256, "epochs": 3, "workers": 0,
}  # fmt: skip


def tensors(run: Path | Run) -> dict[str, torch.Tensor]:
    folder = run.folder if isinstance(run, Run) else run
    return load_file(folder / "export" / "model.safetensors")


def last_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").glob("step-*.safetensors")))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Run:
    return train("digits", out=tmp_path_factory.mktemp("runs") / "straight", **TINY, **EVERYTHING, **QUIET)


def test_a_run_leaves_all_that_it_promises(straight: Run) -> None:
    names = {str(path.relative_to(straight.folder)) for path in straight.folder.rglob("*") if path.is_file()}
    assert {"recipe.yaml", "environment.json", "log.jsonl", "report.html", "export/model.json"} <= names
    assert {"checkpoints/best.safetensors", "checkpoints/step-00000015.safetensors"} <= names
    records = straight.records()
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert {"loss", "top1", "top5", "lr", "train_loss", "ema_top1"} <= set(records[0])
    about = json.loads((straight.folder / "export" / "model.json").read_text())
    assert about["weights"] == "averaged"
    assert about["class_names"] == [str(digit) for digit in range(10)]
    report = (straight.folder / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "")
    assert "label smoothing" in report or "label_smoothing" in report


def test_the_export_predicts_what_the_log_says(straight: Run) -> None:
    got = patchloom.evaluate(straight.folder, "digits")
    assert got["count"] == 359
    assert got["top1"] == straight.records()[-1]["ema_top1"]
    assert got["loss"] == pytest.approx(straight.records()[-1]["ema_loss"], rel=1e-6)
    checkpoint = patchloom.load(max((straight.folder / "checkpoints").glob("step-*")))
    assert same(dict(checkpoint.state_dict()), tensors(straight))


@pytest.mark.parametrize("step", [1, 4, 5, 7, 14, 15])
def test_a_run_cut_after_any_step_goes_on_to_the_same_bits(
    step: int, straight: Run, tmp_path: Path, monkeypatch
) -> None:
    """Cut by a signal that arrives in the middle of a step; resumed in a fresh loop."""
    real = Loop.step

    def stopping(self: Loop, batch) -> None:
        real(self, batch)
        if self.counters.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "step", stopping)
    out = tmp_path / "cut"
    with pytest.raises(InterruptedWork, match=f"step {step} of 15"):
        train("digits", out=out, **TINY, **EVERYTHING, **QUIET)
    logged = len(Run.open(out).records())
    assert logged == (step - 1) // 5  # at the end of an epoch it did not wait for the evaluation
    monkeypatch.setattr(Loop, "step", real)
    resume(out, **QUIET)
    assert same(tensors(out), tensors(straight))
    assert same(last_checkpoint(out), last_checkpoint(straight.folder))
    figures = [{k: v for k, v in r.items() if k not in ("time", "images_per_second")} for r in Run.open(out).records()]
    want = [{k: v for k, v in r.items() if k not in ("time", "images_per_second")} for r in straight.records()]
    assert figures == want


def test_a_killed_process_goes_on_to_the_same_bits(straight: Run, tmp_path: Path) -> None:
    """kill -9, three times, with two loader workers and a checkpoint every other step."""
    out = tmp_path / "killed"
    settings = [f"{'img_size' if key == 'resolution' else key}={value}" for key, value in EVERYTHING.items()]
    words = ["train", "digits", "--model", "deit_nano", "--recipe", "deit@small", "--out", str(out), *settings]
    words += ["workers=2", "checkpoint_every=2", "model.depth=1", "model.dim=24", "model.heads=2"]
    for _ in range(3):
        before = set((out / "checkpoints").glob("step-*"))
        process = subprocess.Popen(
            [sys.executable, "-m", "patchloom", *words], start_new_session=True, stdout=-3, stderr=-3
        )
        limit = time.time() + 120
        while set((out / "checkpoints").glob("step-*")) <= before and process.poll() is None:
            assert time.time() < limit
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        words = ["resume", str(out)]
    subprocess.run([sys.executable, "-m", "patchloom", *words], check=True, capture_output=True)
    assert same(tensors(out), tensors(straight))
    assert same(last_checkpoint(out), last_checkpoint(straight.folder))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    changes = {**EVERYTHING, "checkpoint_every": "2", "ema": 0.0, "epochs": 2}
    train("digits", out=out, **TINY, **changes, **QUIET)
    want = tensors(out)
    last = max((out / "checkpoints").glob("step-*"))
    blob = bytearray(last.read_bytes())
    blob[len(blob) // 2] ^= 1
    last.write_bytes(bytes(blob))
    resume(out, Console())
    assert "step-00000010.safetensors is damaged" in capsys.readouterr().out
    assert same(tensors(out), want)


def test_a_run_can_be_extended(tmp_path: Path, capsys) -> None:
    changes = {**EVERYTHING, "epochs": 1}
    train("digits", out=tmp_path / "run", **TINY, **changes, **QUIET)
    resume(tmp_path / "run", Console(), more_epochs=2)
    assert "The schedule changes" in capsys.readouterr().out
    assert [record["epoch"] for record in Run.open(tmp_path / "run").records()] == [1, 2, 3]


def test_a_loss_that_is_not_finite_stops_with_the_state_before_it(tmp_path: Path) -> None:
    changes = {**EVERYTHING, "lr": 1e30, "warmup_epochs": 0.0, "clip_grad": 0.0}
    with pytest.raises(StoppedError, match=r"not finite .* at step \d+, learning rate \d\.\d+e\+29"):
        train("digits", out=tmp_path / "run", **TINY, **changes, **QUIET)
    assert last_checkpoint(tmp_path / "run")
    assert not (tmp_path / "run" / "export").exists()


def test_a_step_that_is_not_finite_leaves_no_trace_in_running_statistics(tmp_path: Path) -> None:
    options = {
        "model": "patchconvnet_nano",
        "recipe": "patchconvnet@small",
        "model_options": {"depth": 1, "norm": "batch"},
    }
    changes = {
        "resolution": 16,
        "batch_size": 256,
        "epochs": 1,
        "workers": 0,
        "checkpoint_every": "1",
        "clip_grad": 0.0,
    }
    with pytest.raises(StoppedError, match="not finite"):
        train("digits", out=tmp_path / "run", **options, **changes, lr=1e25, warmup_epochs=0.0, **QUIET)
    saved = last_checkpoint(tmp_path / "run")
    step = saved["optimizer.model.head.weight.step"]
    counts = [tensor for name, tensor in saved.items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(count == step for count in counts)
    assert all(tensor.isfinite().all() for name, tensor in saved.items() if "running" in name)


def test_an_image_lost_while_training_stops_with_everything_saved(tmp_path: Path, monkeypatch) -> None:
    real = Classification.batches

    def losing(self: Classification, start: int, end: int):
        for i, batch in enumerate(real(self, start, end)):
            if i == 3:
                raise PatchloomError("ant/7.png cannot be read as an image: No such file or directory")
            yield batch

    monkeypatch.setattr(Classification, "batches", losing)
    with pytest.raises(PatchloomError, match=r"at step 3, everything saved: ant/7\.png cannot be read") as caught:
        train("digits", out=tmp_path / "run", **TINY, **EVERYTHING, **QUIET)
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / "checkpoints" / "step-00000003.safetensors").exists()


def test_a_line_of_the_log_that_is_no_record_is_named(straight: Run, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text((straight.folder / "log.jsonl").read_text() + "garbage\n")
    with pytest.raises(PatchloomError, match="line 4 is not a record"):
        Run(tmp_path, {}).records()


def test_equal_weights_are_equal_bytes_that_others_may_read(straight: Run, tmp_path: Path) -> None:
    path = tmp_path / "again.safetensors"
    patchloom.save(patchloom.load(straight.folder), path)
    assert path.read_bytes() == (straight.folder / "export" / "model.safetensors").read_bytes()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_workers_and_accumulation_change_nothing(tmp_path: Path) -> None:
    changes = {**EVERYTHING, "epochs": 1, "mixup": 0.0, "cutmix": 0.0, "erasing": 0.0, "drop_path": 0.0}
    runs = {}
    for name, more in {"plain": {}, "workers": {"workers": 2}, "accumulated": {"accumulate": 4}}.items():
        runs[name] = tensors(train("digits", out=tmp_path / name, **TINY, **{**changes, **more}, **QUIET))
    assert same(runs["plain"], runs["workers"])
    for name, tensor in runs["plain"].items():
        torch.testing.assert_close(runs["accumulated"][name], tensor, rtol=1e-3, atol=1e-5)


def test_a_folder_with_a_run_is_refused(straight: Run, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="holds a run already"):
        train("digits", out=straight.folder, **TINY, **EVERYTHING, **QUIET)
    with pytest.raises(PatchloomError, match="no run"):
        resume(tmp_path)


def photos(folder: Path, count: int = 12) -> Path:
    digits = open_source("digits")
    for i, item in enumerate(digits.splits["train"][:count]):
        path = folder / str(i % 2) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digits.read(item).save(path)
    return folder


def test_changed_data_is_noticed_and_the_recipe_left_as_it_was(tmp_path: Path, monkeypatch) -> None:
    data, out = photos(tmp_path / "photos"), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    train("photos", out=out, **TINY, **{**EVERYTHING, "epochs": 1}, **QUIET)
    monkeypatch.chdir("/")
    resume(out, **QUIET)  # from anywhere
    (data / "0" / "new.png").write_bytes((data / "0" / "0.png").read_bytes())
    with pytest.raises(PatchloomError, match="has changed since"):
        resume(out, **QUIET, more_epochs=5)
    assert Run.open(out).settings["epochs"] == 1


def test_two_processes_cannot_train_in_one_folder(straight: Run) -> None:
    with Run.open(straight.folder).locked(), pytest.raises(PatchloomError, match="Another process"):
        resume(straight.folder, **QUIET)


def test_when_every_checkpoint_is_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("digits", out=out, **TINY, **{**EVERYTHING, "epochs": 1}, **QUIET)
    for path in (out / "checkpoints").glob("step-*"):
        path.write_bytes(path.read_bytes()[:1000])
    for _ in range(2):
        with pytest.raises(PatchloomError, match="damaged"):
            resume(out, **QUIET)


@pytest.mark.parametrize("changes", [{"checkpoint_every": "banana"}, {"betas": (2.0, 3.0)}, {"no_decay": ("foo",)}])
def test_a_bad_setting_leaves_no_run_behind(changes: dict, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError):
        train("digits", out=tmp_path / "run", **TINY, **{**EVERYTHING, **changes}, **QUIET)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_extension_is_evaluated_where_it_is(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run"
    train("digits", out=out, **TINY, **{**EVERYTHING, "epochs": 1}, **QUIET)
    real = Loop.step

    def stopping(self: Loop, batch) -> None:
        real(self, batch)
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(Loop, "step", stopping)
    with pytest.raises(InterruptedWork, match="SIGHUP at step 6 of 10"):
        resume(out, **QUIET, more_epochs=1)
    newest = patchloom.load(max((out / "checkpoints").glob("step-*")))
    assert same(dict(patchloom.load(out).state_dict()), dict(newest.state_dict()))
    assert not same(dict(newest.state_dict()), tensors(out))


@pytest.mark.parametrize("recipe", ["deit3_1k@small", "old_fashioned@small"])
def test_other_optimizers_resume_to_the_same_bits(recipe: str, tmp_path: Path) -> None:
    """LAMB and SGD, with BatchNorm in the stem, from the checkpoint before the last."""
    options = {**TINY, "recipe": recipe, "model_options": {"depth": 1, "dim": 24, "heads": 2, "stem": "hmlp"}}
    changes = {"resolution": 16, "batch_size": 256, "epochs": 2, "workers": 0, "checkpoint_every": "3"}
    train("digits", out=tmp_path / "run", **options, **changes, **QUIET)
    want = tensors(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000010.safetensors").unlink()
    (tmp_path / "run" / "export" / "model.safetensors").unlink()
    resume(tmp_path / "run", **QUIET)
    assert same(tensors(tmp_path / "run"), want)


def test_the_plan_writes_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = plan_training("digits", "deit_nano", "deit@small", {"epochs": 2, "resolution": 16}, {"depth": 1})
    plan = measure_plan(run, Console(quiet=True))
    assert not list(tmp_path.iterdir())
    assert plan["steps"] == 2 * (1438 // 64)
    assert plan["lr"] == 1e-3
    assert plan["estimated_seconds"] > 0
    assert "44 steps" in "".join(plan_lines(plan))
    wild = plan_training("digits", "deit_nano", "deit@small", {"lr": 1e30, "warmup_epochs": 0.0, "resolution": 16}, {})
    with pytest.raises(StoppedError, match="not finite"):
        measure_plan(wild, Console(quiet=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"gradient_checkpointing": True}, {"loss": "bce", "label_smoothing": 0.0}]
)
def test_other_ways_to_train(changes: dict, tmp_path: Path) -> None:
    if "precision" in changes and not survives(changes["precision"]):
        pytest.skip(f"{changes['precision']} {why_not(changes['precision'])}")
    run = train("digits", out=tmp_path / "run", **TINY, **{**EVERYTHING, "epochs": 4, **changes}, **QUIET)
    losses = [record["train_loss"] for record in run.records()]
    assert losses[-1] < losses[0]


def test_predictions_in_order_with_bad_files_among_them(straight: Run, tmp_path: Path) -> None:
    from PIL import Image

    for i in range(3):
        Image.new("RGB", (20, 16), (i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "1b.png").write_text("no")
    rows = patchloom.predict(straight.folder, tmp_path)
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "1b.png", "2.png"]
    assert rows[2]["error"] == "not an image in a supported format; the file starts with b'no'"  # the path is beside it
    assert len(rows[0]["predictions"]) == 5
    chances = [entry["probability"] for entry in rows[0]["predictions"]]
    assert chances == sorted(chances, reverse=True)
    (tmp_path / "empty").mkdir()
    rows = patchloom.predict(
        straight.folder, [str(tmp_path / "*.png"), tmp_path / "no.png", tmp_path / "empty", "*.xyz"]
    )
    assert ["error" in row for row in rows] == [False, False, True, False, True, True, True]
    with pytest.raises(PatchloomError, match="at least 1, not 0"):
        patchloom.predict(straight.folder, tmp_path, top=0)
