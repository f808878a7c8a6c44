"""Side-by-side timing: every contender once a round, in turn, so that a slow moment of the machine hits all alike."""

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
    """Seconds of each call, a list of `rounds` for each contender, until `device` has done what it was asked for."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            wait_for(device)
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high); of one value three times that."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> tuple[float, float, float]:
    """How many times faster `ours` is, round by round: the median and the quartiles, (median, low, high)."""
    low, middle, high = quartiles([a / b for a, b in zip(times[peer], times[ours], strict=True)])
    return middle, low, high


PRODUCT = 2048  # rows and columns of what counts as a large product


def large_product(device: torch.device = _CPU) -> Callable[[], Tensor]:
    """A square float32 product. All of it is in one piece of memory, so large that glibc does not change its ways when
    it is freed, as it does after smaller pieces: what is measured next would have fewer page faults than a user's."""
    a, b, out = torch.randn(3, PRODUCT, PRODUCT).to(device)
    return lambda: torch.matmul(a, b, out=out)


def share(macs: float, seconds: float, products: Sequence[float]) -> float:
    """The rate of so many multiply-accumulates, as a part of that of large products of the same rounds."""
    return macs / seconds / (PRODUCT**3 / statistics.median(products))


def gemm_rate(rounds: int = 5, device: torch.device = _CPU) -> float:
    """Multiply-accumulates a second of a large product on all threads: what the machine can do at best."""
    return PRODUCT**3 / statistics.median(interleaved({"gemm": large_product(device)}, rounds, device=device)["gemm"])


def copy_rate(megabytes: int = 256, rounds: int = 5, device: torch.device = _CPU) -> float:
    """Bytes a second read and written by a copy that no cache holds."""
    a = torch.zeros(megabytes * 2**18, device=device)
    b = torch.empty_like(a)
    seconds = interleaved({"copy": lambda: b.copy_(a)}, rounds, device=device)["copy"]
    return 2 * megabytes * 2**20 / statistics.median(seconds)
