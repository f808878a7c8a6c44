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
from patchloom.devices import Device, choose_device, device_name
from patchloom.errors import PatchloomError
from patchloom.kernels.native import why_not

# How far a figure may fall below the recorded one before it counts; below zero, how far one may rise that is best low.
# From process to process glibc gives memory back more or less often, which moves an eager peer by a quarter; what ours
# is beside a product of the same rounds is within a tenth.
BANDS = {
    "share": 0.1,
    "latency_share": 0.2,
    "memory_ratio": -0.3,
    "ratio": 0.3,
    "latency_ratio": 0.3,
    "cpu_ratio": 0.15,
    "kept": -0.07,
    "agreement": 0.02,
}
Row = Mapping[str, Any]


def about_machine(device: Device = "auto") -> dict[str, Any]:
    """Versions and settings, and the rates of a large product and of a copy, which bound what a network can reach."""
    chosen = choose_device(device)
    try:
        timm: str | None = version("timm")
    except PackageNotFoundError:
        timm = None
    return {
        "torch": torch.__version__,
        "timm": timm,
        "device": device_name(chosen),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": (why_not() or "C++").rstrip("."),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")} or "default",
        "gemm_macs_per_s": gemm_rate(device=chosen),
        "copy_bytes_per_s": copy_rate(device=chosen),
    }


def in_a_sentence(about: Mapping[str, Any], rounds: int) -> str:
    return (
        f"torch {about['torch']}, timm {about['timm']}, {about['device']}, "
        f"{about['threads']} threads ({about['instructions']}), kernels: {about['kernels']}, "
        f"{rounds} interleaved rounds, allocator {about['allocator']}; "
        f"a large product at {about['gemm_macs_per_s'] / 1e9:.0f} GMAC/s, "
        f"a copy at {about['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )


def keep(rows: Sequence[Row], about: Mapping[str, Any], path: Path) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise PatchloomError(f"{path} cannot be written ({error.strerror}).") from error


def read_recorded(path: str | Path) -> list[Row]:
    """The rows of a file that `keep` wrote, those with figures that can be compared."""
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        found = [row for row in rows if {_case(row)} and _figures(row)]  # a set: cases are looked up
        if not all(isinstance(figure, int | float) for row in found for figure in _figures(row).values()):
            raise TypeError
    except OSError as error:
        raise PatchloomError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is not a file of kept figures.") from error
    if not found:
        raise PatchloomError(f"{path} has no figure to compare with.")
    return found


def compare(rows: Sequence[Row], recorded: Sequence[Row]) -> None:
    """Raise when a figure is worse than the recorded one of the same case by more than its noise band."""
    now, then = ({_case(row): row for row in some} for some in (rows, recorded))
    shared = [case for case in now if case in then]
    if not shared:
        raise PatchloomError("None of the cases measured is among those recorded: nothing was compared.")
    for why, cases in (("not recorded", now.keys() - then.keys()), ("not measured", then.keys() - now.keys())):
        if cases:
            names = sorted(f"{case[0]} (beside {case[1]})" if case[1] else str(case[0]) for case in cases)
            print(f"not compared, as {why}: {', '.join(names)}", file=sys.stderr)
    worse = [
        f"{case[0]}: {figure} {found:.2f}, recorded {before:.2f}"
        for case in shared
        for figure, found, before in _pairs(now[case], then[case])
        if not (found >= before * (1 - BANDS[figure]) if BANDS[figure] > 0 else found <= before * (1 - BANDS[figure]))
    ]
    if worse:
        raise PatchloomError("worse than recorded by more than the noise band: " + "; ".join(worse))


def _pairs(now: Row, then: Row) -> list[tuple[str, float, float]]:
    """What two rows of a case both have: figure, found, recorded."""
    found, before = _figures(now), _figures(then)
    return [(figure, found[figure], before[figure]) for figure in BANDS if figure in found and figure in before]


def _figures(row: Row) -> dict[str, float]:
    ours, theirs = row.get("ours", {}), row.get("theirs", {})
    known = {**row, **ours}
    if ours.get("memory_mb") and theirs.get("memory_mb"):
        known["memory_ratio"] = ours["memory_mb"] / theirs["memory_mb"]
    return {figure: known[figure] for figure in BANDS if known.get(figure) is not None}


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("model", "peer", "batch", "size", "depth"))
