"""The run folder: settings, environment, log, checkpoints and results of one run.

RUN/
    recipe.yaml         settings, complete: what `resume` reads
    environment.json    versions, machine, data, git state
    log.jsonl           one record per evaluation
    checkpoints/        see `patchloom.training.checkpoints`
    export/, report.html  at the end
    .lock               held by the process that trains
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from patchloom.errors import PatchloomError, StoppedError, errors_in_writing
from patchloom.reading import parse_json, read_file
from patchloom.temporary import sweep, write_json, write_text
from patchloom.training.checkpoints import Checkpoints
from patchloom.training.loggers import Logger
from patchloom.training.machine import describe_machine, packages

STAGES = "stages.json"  # in the folder of two runs in sequence: see `patchloom.runs.sequence`
_MOST = 1 << 30  # bytes of a file of a run folder that is read whole
# settings that change no result; the images at another place are compared with those that the run began with
_FREE = ("workers", "checkpoint_every", "log", "data", "gradient_checkpointing", "sources")


class Run:
    """The files of one run. `settings` is what recipe.yaml holds: all that decides the result.

    Args:
        folder: need not exist; `create` makes it.
        settings: JSON values by name, in the order in which recipe.yaml lists them.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.loggers: list[Logger] = []
        self.own_continuation: str | None = None  # of a run that no command can continue

    @property
    def continuation(self) -> str:
        """How an interrupted run is continued, for the end of messages."""
        # The first of two runs in sequence: resuming their common folder continues both.
        both = self.folder.parent
        is_first = (both / STAGES).exists() and not (both / "recipe.yaml").exists()
        place = both if is_first else self.folder
        return self.own_continuation or f"`patchloom resume {quote(str(place))}` continues it."

    def create(self, details: Mapping[str, Any]) -> None:
        """Begin the folder. recipe.yaml comes last: with it a run can be resumed."""
        with errors_in_writing(self.folder):
            write_json(self.folder / "environment.json", {**describe_machine(), **details})
            self._write_settings()

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run in a folder."""
        path = folder / "recipe.yaml"
        if not path.exists():
            raise PatchloomError(f"{folder} holds no run: there is no recipe.yaml in it.")
        return cls(folder, read_settings(path))

    @classmethod
    def of(cls, place: Path) -> Run | None:
        """The run that made what is at `place`: a run folder, its export or checkpoints, or a file in one of them."""
        for folder in folders_of(place):
            with suppress(PatchloomError, OSError):
                return cls.open(folder)
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder. The lock is released however this process ends."""
        path = self.folder / ".lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A run folder may be in a shared directory: a link or a FIFO that someone put in place of .lock is not
            # followed or waited for.
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if path.is_symlink():
                raise PatchloomError(f"{path} is a link, which is not followed: remove it.") from error
            raise PatchloomError(f"{self.folder} cannot be written: {error}.") from error
        # Closing releases the lock. The kernel does the same for a process that is killed, so a lock is never stale.
        try:
            if not _lock(handle, path):
                raise PatchloomError(f"Another process is training in {self.folder}.")
            yield
        finally:
            os.close(handle)

    def environment(self) -> dict[str, Any]:
        """What environment.json holds."""
        path = self.folder / "environment.json"
        try:
            found = parse_json(read_file(path, _MOST))
            return {**found, "data": dict(found["data"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PatchloomError(f"{path} is damaged or missing: {error}.") from error

    def identity(self) -> dict[str, Any]:
        """What a checkpoint records of its run, so that an edited recipe.yaml or updated libraries are noticed."""
        return {"settings": self.settings, "packages": packages()}

    def extend(self, epochs: int) -> None:
        """Record in environment.json, before recipe.yaml changes, that the run is extended to this number of epochs.

        Otherwise a checkpoint from before the extension would make the new number look like an edit of recipe.yaml.
        """
        found = self.environment()
        found["extended"] = [*found.get("extended", []), epochs]
        with errors_in_writing(self.folder, StoppedError):
            write_json(self.folder / "environment.json", found)

    def check_unedited(
        self, identity: Mapping[str, Any], current: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    ) -> None:
        """Refuse settings that were edited since a checkpoint was written; `identity` is empty in older ones. `current`
        gives settings of any version the form that this one writes."""
        # `extend` writes environment.json, then recipe.yaml. A checkpoint from before it still has the old
        # number.
        known = current(identity.get("settings") or {})
        if self.settings.get("epochs") in self.environment().get("extended", []):
            known["epochs"] = self.settings["epochs"]
        now = current(self.settings)
        added = [key for key in now if identity.get("settings") and key not in known and key not in _FREE]
        if edited := [*_differences(known, now), *(f"{key} is {json.dumps(now[key])}, was not there" for key in added)]:
            raise PatchloomError(
                f"{self.folder / 'recipe.yaml'} was edited after the run began: {'; '.join(edited)}. Put the old "
                "values back to resume it, or start another run."
            )

    def differences(self, settings: Mapping[str, Any]) -> list[str]:
        """How other settings differ from those of the run, apart from settings that change no result."""
        return _differences(self.settings, settings)

    def renew(self) -> None:
        """Write recipe.yaml again, and remove what killed processes left: temporary files, half a line of the log."""
        log = self.folder / "log.jsonl"
        with errors_in_writing(self.folder, StoppedError):
            for folder in (self.folder, self.folder / "export"):
                sweep(folder, ".+")
            self._write_settings()
            # A record is complete if it ends with a newline; the checkpoint that the run resumes from writes it again.
            if log.exists() and not (text := read_file(log, _MOST)).endswith(b"\n"):
                os.truncate(log, text.rfind(b"\n") + 1)

    def _write_settings(self) -> None:
        """recipe.yaml: one `key: value` per line, values as JSON, which YAML includes."""
        lines = [f"{key}: {json.dumps(value)}" for key, value in self.settings.items()]
        write_text(self.folder / "recipe.yaml", "\n".join(lines) + "\n")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record; it survives a kill."""
        log = self.folder / "log.jsonl"
        with errors_in_writing(log, StoppedError), open(log, "a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for logger in self.loggers:
            logger.write(record)

    def records(self) -> list[dict[str, Any]]:
        """The records of the log. Those that were written again after a resume count once, and the half line that a
        killed process may have left does not count."""
        path = self.folder / "log.jsonl"
        last: dict[Any, dict[str, Any]] = {}
        try:
            *lines, half = read_file(path, _MOST).split(b"\n") if path.exists() else [b""]
        except OSError as error:
            raise PatchloomError(f"{path} cannot be read: {error.strerror or error}.") from error
        for i, line in enumerate([*lines, *([half] if not b"{".startswith(half[:1]) else [])], 1):
            try:
                row = parse_json(line)
                # A run that resumes from an older checkpoint repeats evaluations: the last record of a step wins.
                last[row.get("event"), row["step"]] = row
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise PatchloomError(f"{path} is damaged: line {i} is not a record.") from error
        return list(last.values())


def folders_of(place: Path) -> tuple[Path, ...]:
    """Where the run may be that a run folder, an export, a checkpoint or a file in one of them belongs to."""
    return (place, *place.parents[:2])


def _lock(handle: int, place: Path) -> bool:
    """Take the lock of an open file, trying for half a second: `patchloom runs` holds it for a moment to see whether it
    is free."""
    for _ in range(10):
        try:
            # flock, not a file with a process id: it is released by the kernel, and ids are reused.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError as error:
            raise PatchloomError(
                f"{place} cannot be locked: {error.strerror}. Choose a folder on another disk."
            ) from error
    return False


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a recipe.yaml.

    Each line is `key: value` with the value as JSON: a subset of YAML that needs no YAML library. Lines that begin
    with "#" and empty lines are skipped.

    Raises:
        PatchloomError: the file is missing or a line has another form.
    """
    try:
        text = read_file(path, _MOST).decode()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        if wrong := [line for line in lines if ": " not in line]:
            raise ValueError(f"{wrong[0][:60]!r} is not `key: value`")
        return {key: parse_json(value) for key, value in (line.split(": ", 1) for line in lines)}
    except (ValueError, OSError) as error:
        raise PatchloomError(f"{path} is damaged: {error}.") from error


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings with other values, but for those that change no result."""
    # As JSON gives them back: a tuple and the list that was read from a file are equal then.
    plain = json.loads(json.dumps([old, new]))
    changed = [key for key in old if key not in _FREE and (key not in plain[1] or plain[0][key] != plain[1][key])]
    return [f"{key} is {json.dumps(new.get(key))}, was {json.dumps(old[key])}" for key in changed]
