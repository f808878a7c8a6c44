"""What was measured, where, kept in a file that a later run can be compared with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from patchloom.benching.timing import copy_rate, gemm_rate
from patchloom.errors import PatchloomError
from patchloom.kernels.native import why_not

# how far a figure may fall below the recorded one before it counts; below zero, how far one may rise that is best low
BANDS = {"ratio": 0.07, "latency_ratio": 0.15, "cpu_ratio": 0.07, "kept": -0.07, "agreement": 0.02}
Row = Mapping[str, Any]


def about_machine() -> dict[str, Any]:
    """Versions and settings, and the rates of a large product and of a copy, which bound what a network can reach."""
    try:
        timm: str | None = version("timm")
    except PackageNotFoundError:
        timm = None
    return {
        "torch": torch.__version__,
        "timm": timm,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": (why_not() or "C++").rstrip("."),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")} or "default",
        "gemm_macs_per_s": gemm_rate(),
        "copy_bytes_per_s": copy_rate(),
    }


def in_a_sentence(about: Mapping[str, Any], rounds: int) -> str:
    return (
        f"torch {about['torch']}, timm {about['timm']}, {about['threads']} threads ({about['instructions']}), "
        f"kernels: {about['kernels']}, {rounds} interleaved rounds, allocator {about['allocator']}; "
        f"a large product at {about['gemm_macs_per_s'] / 1e9:.0f} GMAC/s, "
        f"a copy at {about['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )


def keep(rows: Sequence[Row], about: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def read_recorded(path: str | Path) -> list[Row]:
    """The rows of a file that `keep` wrote, those that have a peer."""
    try:
        return [row for row in json.loads(Path(path).read_text())["rows"] if row.get("ratio") is not None]
    except OSError as error:
        raise PatchloomError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is not a file of kept figures.") from error


def compare(rows: Sequence[Row], recorded: Sequence[Row]) -> None:
    """Raise when a figure is worse than the recorded one of the same case by more than its noise band."""
    before = {_case(row): row for row in recorded}
    shared = [(row, before[_case(row)]) for row in rows if _case(row) in before]
    if not shared:
        raise PatchloomError("None of the cases measured is among those recorded: nothing was compared.")
    if new := [str(row["model"]) for row in rows if _case(row) not in before]:
        print(f"not compared, as not recorded: {', '.join(new)}", file=sys.stderr)
    worse = [
        f"{now['model']}: {figure} {now[figure]:.2f}, recorded {then[figure]:.2f}"
        for now, then in shared
        for figure, band in BANDS.items()
        if then.get(figure) is not None and now.get(figure) is not None
        if not (now[figure] >= then[figure] * (1 - band) if band > 0 else now[figure] <= then[figure] * (1 - band))
    ]
    if worse:
        raise PatchloomError("worse than recorded by more than the noise band: " + "; ".join(worse))


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("model", "peer", "batch", "size", "depth"))
