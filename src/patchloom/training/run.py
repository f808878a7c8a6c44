"""The run folder: what was asked for, where it ran, what happened, and what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from patchloom import drafts
from patchloom.errors import PatchloomError, StoppedError
from patchloom.training.checkpoints import Checkpoints
from patchloom.training.mirrors import Mirror

_PACKAGES = ("patchloom", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors", "scikit-learn")
# settings that change no result; the images at another place are compared with those that the run began with
_FREE = ("workers", "checkpoint_every", "log", "data")


class Run:
    """The files of one run. `settings` is what recipe.yaml holds: all that decides the result."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.before: dict[str, Any] | None = None  # the settings that recipe.yaml may still hold, while they change
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.mirrors: list[Mirror] = []

    def create(self, about: Mapping[str, Any]) -> None:
        """Begin the folder. recipe.yaml comes last: with it a run can be resumed."""
        try:
            write_text(self.folder / "environment.json", json.dumps({**environment(), **about}, indent=1) + "\n")
            self._write_settings()
        except OSError as error:
            raise PatchloomError(f"{self.folder} cannot be written: {error}.") from error

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run in a folder."""
        path = folder / "recipe.yaml"
        if not path.is_file():
            raise PatchloomError(f"{folder} holds no run: there is no recipe.yaml in it.")
        return cls(folder, read_settings(path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder; however this one ends, the lock goes with it."""
        path = self.folder / ".lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if path.is_symlink():
                raise PatchloomError(f"{path} is a link, which is not followed: remove it.") from error
            raise StoppedError(f"{self.folder} cannot be written: {error}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise PatchloomError(f"Another process is training in {self.folder}.") from error
        try:
            yield
        finally:
            os.close(handle)

    def about(self) -> dict[str, Any]:
        """What environment.json holds."""
        path = self.folder / "environment.json"
        try:
            about = json.loads(path.read_text())
            return {**about, "data": dict(about["data"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PatchloomError(f"{path} is damaged or missing: {error}.") from error

    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of its run: that recipe.yaml was edited, or libraries updated, is noticed."""
        return {"settings": self.settings, "before": self.before, "packages": packages()}

    def check_unedited(self, identity: Mapping[str, Any]) -> None:
        """Refuse settings that were edited since a checkpoint was written; `identity` is empty in older ones."""
        known = [settings for settings in (identity.get("settings"), identity.get("before")) if settings]
        edited = [_differences(settings, self.settings) for settings in known]
        if edited and all(edited):
            raise PatchloomError(
                f"{self.folder / 'recipe.yaml'} was edited after the run began: {'; '.join(edited[0])}. Put the old "
                "values back to resume it, or start another run."
            )

    def renew(self) -> None:
        """Write recipe.yaml anew, and cut off the half line that a killed process may have left in the log."""
        log = self.folder / "log.jsonl"
        try:
            self._write_settings()
            if log.exists() and not (text := log.read_bytes()).endswith(b"\n"):
                os.truncate(log, text.rfind(b"\n") + 1)
        except OSError as error:
            raise StoppedError(f"{self.folder} cannot be written: {error}.") from error

    def _write_settings(self) -> None:
        """recipe.yaml: one `key: value` a line, values as JSON, which YAML includes."""
        lines = [f"{key}: {json.dumps(value)}" for key, value in self.settings.items()]
        write_text(self.folder / "recipe.yaml", "\n".join(lines) + "\n")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record; it survives a kill."""
        try:
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoppedError(f"{self.folder / 'log.jsonl'} cannot be written: {error}.") from error
        for mirror in self.mirrors:
            mirror.write(record)

    def records(self) -> list[dict[str, Any]]:
        """The records of the log. Those that were written again after a resume count once, and the half line that a
        killed process may have left does not count."""
        path = self.folder / "log.jsonl"
        last: dict[Any, dict[str, Any]] = {}
        for i, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
            try:
                row = json.loads(line)
                last[row.get("event"), row["step"]] = row
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise PatchloomError(f"{path} is damaged: line {i} is no record.") from error
        return list(last.values())


def read_settings(path: Path) -> dict[str, Any]:
    try:
        pairs = (line.split(": ", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))
        return {key: json.loads(value) for key, value in pairs}
    except (ValueError, OSError, RecursionError) as error:
        raise PatchloomError(f"{path} is damaged: {error}.") from error


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings with other values, but for those that change no result."""
    plain = json.loads(json.dumps([old, new]))
    changed = [key for key in old if key not in _FREE and (key not in plain[1] or plain[0][key] != plain[1][key])]
    return [f"{key} is {json.dumps(new.get(key))}, was {json.dumps(old[key])}" for key in changed]


def write_text(path: Path, text: str) -> None:
    """Written aside, synced, then moved into place."""
    aside = drafts.aside(path)
    try:
        with open(aside, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def environment() -> dict[str, Any]:
    """Versions, machine, and the state of the code, for whoever asks later why a figure differs."""
    return {
        "python": platform.python_version(),
        "packages": packages(),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "git": _git_state(),
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@cache
def packages() -> dict[str, str | None]:
    """The versions of the libraries that a result depends on."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Of the folder that the command was given in."""
    try:
        commit, changes = (
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": len(changes.splitlines())}
