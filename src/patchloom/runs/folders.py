"""A free folder for a run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from patchloom.errors import PatchloomError


@contextmanager
def free_folder(data: str | PathLike[str], root: Path = Path("runs")) -> Iterator[Path]:
    """A new folder for a run, named after its data. One that stays empty is removed again."""
    # Letters of any script, digits, dots and dashes stay; anything else could be special to a shell.
    name = re.sub(r"[^\w.-]+", "-", Path(os.fspath(data)).absolute().stem).strip("-.") or "run"
    try:
        folder = _made(root, name)
    except OSError as error:
        raise PatchloomError(
            f"Cannot create a folder in {root}: {error.strerror}. Choose another place with --out."
        ) from error
    try:
        yield folder
    finally:
        with suppress(OSError):
            # Refused before it began, by a wrong setting for instance.
            if set(os.listdir(folder)) <= {".lock"}:
                shutil.rmtree(folder)


def _made(root: Path, name: str) -> Path:
    """root/name, root/name-2, ...: making it is what reserves it."""
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            # mkdir fails if the folder exists, in one system call: two runs that start at once get two folders.
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
