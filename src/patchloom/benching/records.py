"""Records of measurements with a description of the machine, in a file that later runs are compared with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from patchloom.benching.timing import copy_rate, gemm_rate
from patchloom.devices import Device, choose_device, device_name
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.kernels.native import why_not
from patchloom.reading import parse_json, read_file
from patchloom.temporary import write_json

_MOST = 1 << 26  # bytes of a file of measurements
# Noise bands: how far a metric may fall below the recorded value, as a fraction; negative for metrics where lower is
# better, which may rise as far. glibc returns memory more or less often in different processes, which changes the time
# of a peer by a quarter; the share of a matrix product in the same rounds varies by less than a tenth.
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


def describe_machine(device: Device = "auto") -> dict[str, Any]:
    """Versions, settings, and the rates of a large matrix product and of a copy, which bound the speed of a network."""
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


def describe_run(machine: Mapping[str, Any], rounds: int) -> str:
    """One line about the machine and the measurement, for people."""
    return (
        f"torch {machine['torch']}, timm {machine['timm']}, {machine['device']}, "
        f"{machine['threads']} threads ({machine['instructions']}), "
        f"kernels: {machine['kernels']}, {rounds} interleaved rounds, allocator {machine['allocator']}; "
        f"a large matrix product at {machine['gemm_macs_per_s'] / 1e9:.0f} GMAC/s, "
        f"a copy at {machine['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )


def write_records(rows: Sequence[Row], machine: Mapping[str, Any], path: Path) -> None:
    """Write rows and the description of the machine as JSON, atomically; raises PatchloomError if that fails."""
    with errors_in_writing(path):
        write_json(path, {"about": machine, "rows": rows})


def read_records(path: str | Path) -> list[Row]:
    """The rows of a file of `write_records` that have metrics to compare; raises PatchloomError for other files."""
    try:
        rows = parse_json(read_file(path, _MOST))["rows"]
        found = [row for row in rows if {_case(row)} and _metrics(row)]  # a set, to fail here if a case is not hashable
        if not all(isinstance(value, int | float) for row in found for value in _metrics(row).values()):
            raise TypeError
    except OSError as error:
        raise PatchloomError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is not a file of recorded measurements.") from error
    if not found:
        raise PatchloomError(f"{path} has no metric to compare with.")
    return found


def compare(rows: Sequence[Row], recorded: Sequence[Row]) -> None:
    """Raise PatchloomError if a metric is worse than the recorded one of the same case by more than its noise band.

    Args:
        rows: measured now.
        recorded: of `read_records`.
    """
    now, then = ({_case(row): row for row in some} for some in (rows, recorded))
    shared = [case for case in now if case in then]
    if not shared:
        raise PatchloomError("No measured case is among the recorded ones: nothing was compared.")
    # Cases on one side only are named rather than failed: a new model has no record yet.
    for reason, cases in (("not recorded", now.keys() - then.keys()), ("not measured", then.keys() - now.keys())):
        if cases:
            names = sorted(f"{case[0]} (beside {case[1]})" if case[1] else str(case[0]) for case in cases)
            print(f"not compared, since {reason}: {', '.join(names)}", file=sys.stderr)
    worse = [
        f"{case[0]}: {metric} {found:.2f}, recorded {before:.2f}"
        for case in shared
        for metric, found, before in _pairs(now[case], then[case])
        # Bands are fractions of the recorded value. `not` also catches NaN.
        if not (found >= before * (1 - BANDS[metric]) if BANDS[metric] > 0 else found <= before * (1 - BANDS[metric]))
    ]
    if worse:
        raise PatchloomError("worse than recorded by more than the noise band: " + "; ".join(worse))


def _pairs(now: Row, then: Row) -> list[tuple[str, float, float]]:
    """(metric, measured value, recorded value) for the metrics that both rows have."""
    found, before = _metrics(now), _metrics(then)
    return [(metric, found[metric], before[metric]) for metric in BANDS if metric in found and metric in before]


def _metrics(row: Row) -> dict[str, float]:
    ours, theirs = row.get("ours", {}), row.get("theirs", {})
    known = {**row, **ours}
    if ours.get("memory_mb") and theirs.get("memory_mb"):
        # Relative to the peer in the same run: allocators and machines differ.
        known["memory_ratio"] = ours["memory_mb"] / theirs["memory_mb"]
    return {metric: known[metric] for metric in BANDS if known.get(metric) is not None}


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("model", "peer", "batch", "size", "depth"))
