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
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from patchloom.errors import PatchloomError, StoppedError
from patchloom.training.checkpoints import Checkpoints
from patchloom.training.mirrors import Mirror

_PACKAGES = ("patchloom", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors", "scikit-learn")


class Run:
    """The files of one run. `settings` is what recipe.yaml holds: all that decides the result."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.mirrors: list[Mirror] = []

    def create(self, about: Mapping[str, Any]) -> None:
        """Begin the folder. recipe.yaml comes last: with it a run can be resumed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
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
        try:
            file = open(self.folder / ".lock", "w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoppedError(f"{self.folder} cannot be written: {error}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PatchloomError(f"Another process is training in {self.folder}.") from error
            yield

    def about(self) -> dict[str, Any]:
        """What environment.json holds."""
        path = self.folder / "environment.json"
        try:
            about = json.loads(path.read_text())
            return {**about, "data": dict(about["data"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PatchloomError(f"{path} is damaged or missing: {error}.") from error

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
        """The records of the log. Those that were written again after a resume count once."""
        path = self.folder / "log.jsonl"
        last: dict[Any, dict[str, Any]] = {}
        for i, line in enumerate(path.read_text().split("\n")[:-1] if path.exists() else [], 1):
            try:
                row = json.loads(line)
                last[row.get("event"), row["step"]] = row
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise PatchloomError(f"{path} is damaged: line {i} is no record.") from error
        return list(last.values())


def read_settings(path: Path) -> dict[str, Any]:
    try:
        pairs = (line.split(": ", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))
        return {key: json.loads(value) for key, value in pairs}
    except (ValueError, OSError) as error:
        raise PatchloomError(f"{path} is damaged: {error}.") from error


def write_text(path: Path, text: str) -> None:
    """Written aside, synced, then moved into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
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
        "packages": {name: _version(name) for name in _PACKAGES},
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
