"""Folders of unfinished work, which end with what makes them, and with the command that a signal ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_open: set[Path] = set()


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder, and take it away at the end."""
    _open.add(folder)  # first: a signal may come at any time
    try:
        folder.mkdir()
        yield
    finally:
        take_away(folder)


def take_away(*folders: Path) -> None:
    """Those given, or all that are there."""
    for folder in folders or tuple(_open):
        shutil.rmtree(folder, ignore_errors=True)
        _open.discard(folder)
