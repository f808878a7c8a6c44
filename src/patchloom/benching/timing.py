"""Interleaved timing: every round calls each contender once, so that a slow moment of the machine affects all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from patchloom.devices import wait_for

_CPU = torch.device("cpu")


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2, device: torch.device = _CPU
) -> dict[str, list[float]]:
    """Seconds of each call, until `device` has finished it: a list of `rounds` values for each contender.

    Args:
        contenders: name -> a call.
        warm_up: rounds that are not counted, for caches, threads and lazy setup.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            # Accelerators return before they have computed.
            wait_for(device)
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile); a single value counts as all three."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> tuple[float, float, float]:
    """The speed of `ours` relative to `peer`, computed per round: (median, first quartile, third quartile)."""
    # Per round, then the median: what slows the machine for a moment slows both.
    low, middle, high = quartiles([a / b for a, b in zip(times[peer], times[ours], strict=True)])
    return middle, low, high


PRODUCT = 2048  # rows and columns of the large matrix product that serves as reference


def large_product(device: torch.device = _CPU) -> Callable[[], Tensor]:
    """A function that computes a square float32 product.

    All matrices are in one allocation, so large that freeing it does not change the mmap threshold of glibc. Smaller
    ones would, and the next measurement would then have fewer page faults than in a user's process.
    """
    a, b, out = torch.randn(3, PRODUCT, PRODUCT).to(device)
    return lambda: torch.matmul(a, b, out=out)


def share(macs: float, seconds: float, products: Sequence[float]) -> float:
    """The rate of `macs` multiply-accumulates in `seconds`, relative to large matrix products of the same rounds."""
    return macs / seconds / (PRODUCT**3 / statistics.median(products))


def gemm_rate(rounds: int = 5, device: torch.device = _CPU) -> float:
    """Multiply-accumulates per second of a large matrix product on all threads: the practical peak of the machine."""
    return PRODUCT**3 / statistics.median(interleaved({"gemm": large_product(device)}, rounds, device=device)["gemm"])


def copy_rate(megabytes: int = 256, rounds: int = 5, device: torch.device = _CPU) -> float:
    """Bytes per second read and written by a copy that does not fit any cache."""
    a = torch.zeros(megabytes * 2**18, device=device)
    b = torch.empty_like(a)
    seconds = interleaved({"copy": lambda: b.copy_(a)}, rounds, device=device)["copy"]
    # Each byte is read once and written once.
    return 2 * megabytes * 2**20 / statistics.median(seconds)
