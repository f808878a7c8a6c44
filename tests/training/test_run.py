"""The run folder: its lock, its log, its settings, and what killed processes left in it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patchloom import temporary
from patchloom.errors import PatchloomError, StoppedError
from patchloom.temporary import write_text
from patchloom.training.checkpoints import Checkpoints, read_checkpoint
from patchloom.training.failures import read_failure
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.weights.files import CHECKPOINT_KEY, digest, kept_checkpoints, write_tensors


def test_the_lock_empties_no_file_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    run = Run(tmp_path / "run", {})
    with run.locked(), pytest.raises(PatchloomError, match="Another process"), run.locked():
        pass
    lock = tmp_path / "run" / ".lock"
    lock.write_text("kept")
    with run.locked():
        assert lock.read_text() == "kept"
    lock.unlink()
    lock.symlink_to(tmp_path / "diary.txt")
    with pytest.raises(PatchloomError, match="is a link"), run.locked():
        pass
    assert (tmp_path / "diary.txt").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("reason", "code"), [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EACCES, 2), (errno.EROFS, 2)]
)
def test_a_full_disk_stops_the_work_and_a_wrong_folder_is_wrong_use(
    reason: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PatchloomError, match="cannot be written") as caught, Run(tmp_path / "run", {}).locked():
        pass
    assert caught.value.exit_code == code


@pytest.mark.parametrize("line", [b"\xff\xfe\x00broken\n", b"[" * 100_000 + b"\n", b"\0\n"])
def test_a_log_that_is_no_text_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"event": "epoch", "step": 1}\n' + line)
    with pytest.raises(PatchloomError, match="line 2 is not a record"):
        Run(tmp_path, {}).records()


def test_the_half_line_of_a_killed_process_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"event": "epoch", "step": 1}\n{"event": "ep')
    assert len(Run(tmp_path, {}).records()) == 1


def test_edited_settings_are_told_with_the_difference_and_those_without_effect_are_free(tmp_path: Path) -> None:
    settings = {"seed": 3, "betas": (0.9, 0.99), "workers": 2, "epochs": 5}
    begun = Run(tmp_path, settings)
    begun.create({"data": {}})
    identity = begun.identity()
    Run(tmp_path, {**settings, "betas": [0.9, 0.99], "workers": 0}).check_unedited(identity)
    with pytest.raises(PatchloomError, match="seed is 4, was 3; epochs is 6, was 5"):
        Run(tmp_path, {**settings, "seed": 4, "epochs": 6}).check_unedited(identity)
    begun.extend(6)
    Run(tmp_path, {**settings, "epochs": 6}).check_unedited(identity)
    with pytest.raises(PatchloomError, match="epochs is 7, was 5"):
        Run(tmp_path, {**settings, "epochs": 7}).check_unedited(identity)
    Run(tmp_path, {"seed": 9}).check_unedited({})  # a checkpoint of an earlier version


def test_a_line_that_was_added_is_told_and_checkpoints_without_settings_allow_any(tmp_path: Path) -> None:
    run = Run(tmp_path, {"epochs": 2, "lr": 1.0})
    run.create({"data": {}})
    identity = run.identity()
    run.settings = {**run.settings, "learning_rate": 0.3, "log": None}
    with pytest.raises(PatchloomError, match=r"edited after the run began: learning_rate is 0\.3, was not there\. Put"):
        run.check_unedited(identity)
    run.check_unedited({})


def test_settings_of_two_versions_are_compared_in_the_form_of_this_one(tmp_path: Path) -> None:
    Run(tmp_path, {}).create({"data": {}})
    identity = {"settings": {"task": "classify", "how": "hard"}}

    def current(settings):
        return {"method" if key == "how" else key: value for key, value in settings.items()}

    Run(tmp_path, {"task": "classify", "method": "hard"}).check_unedited(identity, current)
    with pytest.raises(PatchloomError, match='method is "soft", was "hard"'):
        Run(tmp_path, {"task": "classify", "method": "soft"}).check_unedited(identity, current)


def test_what_killed_processes_left_is_removed_by_the_next_that_writes(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = re.sub(r"\W", "", platform.node())
    left = tmp_path / f".recipe.yaml.{host}-{dead.pid}"
    others = [
        tmp_path / f".recipe.yaml.{host}-{os.getppid()}",
        tmp_path / f".recipe.yaml.another{host}-{dead.pid}",  # the number may be of a living process there
        tmp_path / ".recipe.yaml.bak",
        tmp_path / f".x.{host}-{dead.pid}",
    ]
    for path in (left, *others):
        path.touch()
    write_text(tmp_path / "recipe.yaml", "seed: 3\n")
    assert not left.exists()
    assert all(path.exists() for path in others)
    left.mkdir()
    assert temporary.aside(tmp_path / "recipe.yaml").name == f".recipe.yaml.{host}-{os.getpid()}"
    assert not left.exists()


def test_what_a_killed_run_left_is_removed_when_it_is_resumed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "export").mkdir()
    names = (".failure.json", ".report.html", "export/.model.safetensors")
    left = [tmp_path / f"{name}.{temporary._HOST}-{dead.pid}" for name in names]
    kept = [tmp_path / ".notes", tmp_path / f".report.html.{temporary._HOST}-{os.getppid()}"]
    for path in (*left, *kept):
        path.touch()
    Run(tmp_path, {"epochs": 1}).renew()
    assert not [path for path in left if path.exists()]
    assert all(path.exists() for path in kept)


def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(PatchloomError, match=r"cannot be locked: No locks available"), Run(tmp_path, {}).locked():
        pass


def test_metadata_of_a_checkpoint_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    path, info = tmp_path / "step-00000001.safetensors", "[" * 100_000
    write_tensors(path, {}, {CHECKPOINT_KEY: info, "sha256": digest(info, {})})
    with pytest.raises(PatchloomError, match="damaged: it is nested too deeply"):
        read_checkpoint(path)


def test_a_lost_process_is_a_message_and_other_errors_stay() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:58574: Connection reset by peer.")
    message = r"Another process of this run ended.* `resume`"
    with pytest.raises(StoppedError, match=message), Processes(1, 2).notice_loss("`resume` continues it."):
        raise lost
    for count, error in ((1, lost), (2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))):
        with pytest.raises(RuntimeError) as caught, Processes(0, count).notice_loss(""):
            raise error
        assert caught.value is error


def test_a_fifo_in_the_place_of_a_checkpoint_or_a_failure_blocks_nothing(tmp_path: Path) -> None:
    for name in ("step-00000012.safetensors", "failure.json"):
        os.mkfifo(tmp_path / name)
    assert kept_checkpoints(tmp_path) == []
    assert read_failure(tmp_path) == {}


def test_foreign_names_among_checkpoints_are_ignored_and_kept(tmp_path: Path) -> None:
    ours = ["step-00000012.safetensors", "step-00000013.shards", "step-00000013+.shards"]
    foreign = ["step-00000012 (1).safetensors", "step-latest.safetensors", "step-99999999.safetensors.part", "tmp-a"]
    for name in (*ours, *foreign, "tmp-00000014.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in kept_checkpoints(tmp_path)] == ours
    with pytest.raises(PatchloomError, match="damaged"):
        Checkpoints(tmp_path).newest(lambda _: None)
    assert all((tmp_path / name).exists() for name in foreign)
    assert not (tmp_path / "tmp-00000014.safetensors").exists()


def read_all(folder: Path) -> None:
    run = Run.open(folder)
    run.environment()
    run.records()


@pytest.mark.parametrize("name", ["log.jsonl", "environment.json", "recipe.yaml"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "nested", "garbage"])
def test_files_of_a_run_that_are_not_what_they_seem_are_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("epochs: 2\n")
    (tmp_path / "environment.json").write_text('{"data": {}}')
    (tmp_path / "log.jsonl").write_text('{"event": "epoch", "step": 1}\n{"event": "ep')
    assert len(Run.open(tmp_path).records()) == 1  # a half line is what a killed process leaves
    (tmp_path / name).unlink()
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "zero":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).write_bytes(b"\xff\xfe\x00" if kind == "garbage" else b"x: " + b"[" * 100_000 + b"\n")
    with pytest.raises(PatchloomError, match=name):
        read_all(tmp_path)


def test_a_run_that_was_extended_is_not_taken_for_edited(tmp_path: Path) -> None:
    run = Run(tmp_path, {"epochs": 2, "lr": 1.0})
    run.create({"data": {}})
    before = run.identity()
    run.extend(3)
    run.settings = {**run.settings, "epochs": 3}
    run.check_unedited(before)
    run.settings = {**run.settings, "epochs": 4}
    with pytest.raises(PatchloomError, match="epochs is 4, was 2"):
        run.check_unedited(before)
    run.settings = {**run.settings, "epochs": 3, "lr": 2.0}
    with pytest.raises(PatchloomError, match=r"lr is 2\.0, was 1\.0"):
        run.check_unedited(before)


def test_a_run_is_found_from_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    Run(folder, {"task": "classify"}).create({"data": {}})
    (folder / "export").mkdir()
    for place in (folder, folder / "export", folder / "export" / "model.safetensors"):
        found = Run.of(place)
        assert found is not None
        assert found.folder == folder
    assert Run.of(tmp_path) is None
    assert Run.of(folder / "a" / "b" / "c") is None


def test_the_first_of_two_runs_is_continued_by_the_folder_of_both(tmp_path: Path) -> None:
    assert f"resume {tmp_path / 'both' / 'low'}`" in Run(tmp_path / "both" / "low", {}).continuation
    (tmp_path / "both").mkdir()
    write_text(tmp_path / "both" / "stages.json", "{}")
    assert f"resume {tmp_path / 'both'}`" in Run(tmp_path / "both" / "low", {}).continuation
