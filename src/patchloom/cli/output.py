"""What commands print and where they write, and which of many processes prints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from patchloom.terminal import printable


def speaks() -> bool:
    """Whether this is the one of many processes that speaks."""
    return os.environ.get("RANK", "0") == "0"


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines with aligned columns; the columns `right` are aligned to the right, and the last is as long as it is."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(_padded(row[i], width, i in right) for i, width in enumerate(widths)), row[-1]]).rstrip()
        for row in rows
    ]


def _padded(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


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
