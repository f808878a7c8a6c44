"""Unfinished files and folders beside their place: they end with what makes them, with the command that a signal ends,
or, where that was killed, with the next one that writes to the same place."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_HOST = re.sub(r"\W", "", platform.node())  # processes of another machine or container have numbers of their own
_open: set[Path] = set()


def aside(path: Path) -> Path:
    """A name of this process for what will be moved to `path`; what killed processes left there is removed."""
    sweep(path.parent, re.escape(path.name))
    return own_name(path)


def own_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}")


def sweep(folder: Path, names: str) -> None:
    """Remove what killed processes of this machine left of files whose names match the expression `names`."""
    for left in folder.glob(".*") if folder.is_dir() else ():
        found = re.fullmatch(rf"\.{names}\.{_HOST}-(\d+)", left.name)
        if found and not _runs(int(found[1])):
            _remove(left)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        pass
    return True


def _remove(path: Path) -> None:
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
    for path in paths or tuple(_open):
        _remove(path)
        _open.discard(path)
