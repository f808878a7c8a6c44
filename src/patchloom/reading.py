"""Bytes and JSON of files that others made: only regular files are read, and none above a limit of size."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from os import PathLike
from typing import Any

from patchloom.errors import PatchloomError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_LEAST = 1 << 16  # bytes; some files of /proc have more than the 0 that they state
_PIECE = 1 << 20  # bytes
_MOST_JSON = 1 << 30  # bytes; iNaturalist's annotations have 600 MB


def read_file(path: str | PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; everything else is an OSError that says why.

    Args:
        most: bytes; a larger file is refused before it is opened.
    """
    try:
        _check_kind(os.stat(path), most)  # before it is opened: that alone can block, or move a device
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL byte") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        _check_kind(status, most)  # again: it may have been replaced
        # Limited once more: a file that is being written to may have grown since. Not `read(most)`, which allocates
        # memory for `most` bytes before it reads.
        return file.read(min(most, max(status.st_size, _LEAST)))


def _check_kind(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than the limit of {most:,}")


def file_digest(path: str | PathLike[str]) -> str:
    """SHA-256 of a file, read in pieces of a megabyte."""
    whole = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            whole.update(piece)
    return whole.hexdigest()


def read_json(path: str | PathLike[str]) -> Any:
    """What a JSON file holds; a file that cannot be read, or is not JSON, is a `PatchloomError`."""
    try:
        return parse_json(read_file(path, _MOST_JSON))
    except OSError as error:
        raise PatchloomError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise PatchloomError(f"{os.fspath(path)} cannot be read as JSON: {error}.") from error


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, for which JSON that is nested too deeply is a ValueError like any other fault.

    Raises:
        ValueError: not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
