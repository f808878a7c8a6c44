"""Side-by-side timing: every contender once a round, in turn, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from patchloom.errors import PatchloomError

NOISE_BAND = 0.07


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, a list of `rounds` for each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> tuple[float, float, float]:
    """How many times faster `ours` is: the ratio of medians, and the quartiles of the ratios of the rounds."""
    rounds = [a / b for a, b in zip(times[peer], times[ours], strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
    return statistics.median(times[peer]) / statistics.median(times[ours]), low, high


def gemm_rate(size: int = 2048, rounds: int = 5) -> float:
    """Multiply-accumulates a second of a square float32 product on all threads: what the machine can do at best."""
    a = torch.randn(size, size)
    seconds = interleaved({"gemm": lambda: a @ a}, rounds)["gemm"]
    return size**3 / statistics.median(seconds)


def copy_rate(megabytes: int = 256, rounds: int = 5) -> float:
    """Bytes a second read and written by a copy that no cache holds."""
    a = torch.zeros(megabytes * 2**18)
    b = torch.empty_like(a)
    seconds = interleaved({"copy": lambda: b.copy_(a)}, rounds)["copy"]
    return 2 * megabytes * 2**20 / statistics.median(seconds)


def compare(rows: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> None:
    """Raise when a ratio is below the recorded one of the same case by more than the noise band."""

    def case(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("model", "peer", "batch", "size"))

    before = {case(row): row["ratio"] for row in recorded}
    slower = [
        f"{row['model']}: {row['ratio']:.2f}, recorded {before[case(row)]:.2f}"
        for row in rows
        if case(row) in before and row["ratio"] < before[case(row)] * (1 - NOISE_BAND)
    ]
    if slower:
        raise PatchloomError("slower than recorded by more than the noise band: " + "; ".join(slower))
