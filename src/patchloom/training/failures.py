"""The error that ended a failed run, in RUN/failure.json until the run is resumed.

`patchloom runs` reads it to tell a failed run from one that was interrupted and can simply be resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from patchloom.errors import InterruptedWork
from patchloom.reading import parse_json, read_file
from patchloom.temporary import write_text

_FILE = "failure.json"
_MOST = 1 << 20  # bytes


@contextmanager
def noted_failure(folder: Path, is_main_process: bool) -> Iterator[None]:
    """Record the error that ends the work inside; an interruption by a signal is not recorded.

    The main process records it, and the caller holds the lock of the run.
    """
    if not is_main_process:
        yield
        return
    with suppress(OSError):
        (folder / _FILE).unlink(missing_ok=True)
    try:
        yield
    except InterruptedWork:
        raise
    except Exception as error:
        note = {"error": str(error) or type(error).__name__, "time": round(time.time(), 3)}
        with suppress(OSError):  # the failure may be a full disk
            write_text(folder / _FILE, json.dumps(note) + "\n")
        raise


def read_failure(folder: Path) -> dict[str, Any] | None:
    """The error that ended the run and when, or None."""
    try:
        note = parse_json(read_file(folder / _FILE, _MOST))
        return note if isinstance(note, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
