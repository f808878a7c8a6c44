"""What commands print and where they write, and which of many processes prints."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def speaks() -> bool:
    """Whether this is the one of many processes that speaks."""
    return os.environ.get("RANK", "0") == "0"


def print_json(value: Any) -> None:
    """What programs read: numbers that are none become null, for JSON has no word for them."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def out_folder(name: str) -> Path:
    """The folder that --out names, made if it is not there."""
    from patchloom.errors import PatchloomError

    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PatchloomError(f"--out {name} cannot be made: {error.strerror}.") from error
    return Path(name)
