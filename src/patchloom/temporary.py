"""Temporary files and folders beside the place of the finished ones.

They are removed when their context ends or when a signal ends the command. What a killed process left behind is removed
by the next one that writes to the same place.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_HOST = re.sub(r"\W", "", platform.node())  # processes of another machine or container have numbers of their own
_open: set[Path] = set()


def aside(path: Path) -> Path:
    """A name of this process for what will be moved to `path`; what killed processes left there is removed."""
    sweep(path.parent, re.escape(path.name))
    return own_name(path)


def own_name(path: Path) -> Path:
    """The temporary name of this process for `path`: hidden, in the same folder, so that a rename is atomic."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: to a temporary file beside it, synced, then renamed.

    The file has its old or its new content at any moment, whenever the process is killed.

    Args:
        text: surrogates, as in file names that are not UTF-8, are written as backslash escapes.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    beside = aside(path)
    try:
        with open(beside, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None  # messages name the file, not its temporary name
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_text` writes a text."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, names: str) -> None:
    """Remove what killed processes of this machine left of files whose names match the expression `names`."""
    for left in folder.glob(".*") if folder.is_dir() else ():
        found = re.fullmatch(rf"\.{names}\.{_HOST}-(\d+)", left.name)
        if found and not _runs(int(found[1])):
            _remove(left)


def _runs(process: int) -> bool:
    try:
        # Signal 0 is not sent; the call only tells whether the process exists.
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        pass
    return True


def _remove(path: Path) -> None:
    # A link is removed itself: rmtree would empty what it leads to.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Make a temporary folder and remove it at the end."""
    _open.add(path)  # first: a signal may come at any time
    try:
        path.mkdir()
        yield
    finally:
        remove(path)


def remove(*paths: Path) -> None:
    """Remove these temporary folders, or all that this process has made."""
    # A copy, since the set changes in the loop.
    for path in paths or tuple(_open):
        _remove(path)
        _open.discard(path)
