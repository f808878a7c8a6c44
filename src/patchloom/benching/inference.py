"""Throughput, latency and memory of a network, and its share of the peak arithmetic rate of the machine."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.benching.peers import pair
from patchloom.benching.timing import interleaved, large_product, quartiles, ratio, share
from patchloom.devices import Device, choose_device
from patchloom.models.complexity import complexity
from patchloom.models.fused import fuse


def measure(
    name: str,
    against: str | None,
    *,
    batch: int = 8,
    size: int = 224,
    depth: int | None = None,
    rounds: int = 15,
    memory: bool = True,
    int8: bool = False,
    device: Device = "auto",
) -> dict[str, Any]:
    """Measure the fused network and, with `against`, its peer in alternation, at `batch` images and at one.

    Returns one row. `ours` and `theirs` have throughput (images per second) and latency_ms (one image), each with
    quartiles; share and latency_share (of the rate of a large matrix product in the same rounds, counting the
    arithmetic of the whole network); and memory_mb (what a forward pass adds to a new process; Linux and CPU
    only). With `int8`, our network uses int8 matrix multiplication.

    Args:
        name: a model by name, with random weights, or a run folder, a file or a published tag.
        against: "timm", "published" or None.
        size: the side of square images, in pixels.
        depth: number of blocks instead of the model's.
        rounds: calls of every contender; medians are reported.
    """
    chosen = choose_device(device)
    torch.manual_seed(0)
    plain, peer = pair(name, against, size, depth)
    plain, peer = plain.to(chosen), peer if peer is None else peer.to(chosen)
    networks = {"ours": fuse(plain, int8=int8), **({} if peer is None else {"theirs": peer})}
    cost = complexity(plain)
    label = f"{name}, int8" if int8 else name
    blocks = getattr(plain.config, "depth", None)  # None for a network of timm, whose blocks are counted in other ways
    row: dict[str, Any] = {"model": label, "peer": against, "batch": batch, "size": size, "depth": blocks}
    row["cost"] = {"macs": cost.macs, "params": cost.params, "activations": cost.activations}
    # Two series: a full batch for the throughput, one image for the latency.
    times = {images: _times(networks, torch.randn(images, 3, size, size).to(chosen), rounds) for images in {batch, 1}}
    measured = memory and chosen.type == "cpu"
    for who in networks:
        many, one = (quartiles(times[images][who]) for images in (batch, 1))
        row[who] = {
            "throughput": batch / many[1],
            "throughput_quartiles": (batch / many[2], batch / many[0]),
            "latency_ms": one[1] * 1e3,
            "latency_quartiles": (one[0] * 1e3, one[2] * 1e3),
            "share": share(cost.macs * batch, many[1], times[batch]["product"]),
            "latency_share": share(cost.macs, one[1], times[1]["product"]),
            "memory_mb": peak_memory(name, who, against, batch, size, depth, int8) if measured else None,
        }
    if peer is not None:
        row["ratio"], row["low"], row["high"] = ratio(times[batch], "theirs", "ours")
        row["latency_ratio"] = ratio(times[1], "theirs", "ours")[0]
        row["difference"] = _difference(networks, torch.randn(2, 3, size, size).to(chosen))
    return row


@torch.inference_mode()
def _times(networks: dict[str, nn.Module], images: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each network and of a large matrix product, whose rate varies on a shared machine."""
    calls = {who: partial(network, images) for who, network in networks.items()}
    return interleaved({**calls, "product": large_product(images.device)}, rounds, device=images.device)


@torch.inference_mode()
def _difference(networks: dict[str, nn.Module], images: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    ours, theirs = networks["ours"](images), networks["theirs"](images)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def peak_memory(
    name: str, who: str, against: str | None, batch: int, size: int, depth: int | None, int8: bool = False
) -> float | None:
    """Megabytes that a forward pass adds to a new process; None on systems without /proc/self/clear_refs."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    # "spawn": a forked child would begin with the memory of this process.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (name, who, against, batch, size, depth, int8, torch.get_num_threads()))


@torch.inference_mode()
def _peak_memory(
    name: str, who: str, against: str | None, batch: int, size: int, depth: int | None, int8: bool, threads: int
) -> float:
    """What `peak_memory` runs in the new process."""
    torch.set_num_threads(threads)
    plain, peer = pair(name, against, size, depth)
    network = fuse(plain, int8=int8) if who == "ours" else peer
    assert network is not None
    images = torch.randn(batch, 3, size, size)
    network(images[:1])  # the setup of a first call does not count
    _release_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = megabytes("VmRSS")
    network(images)
    return megabytes("VmHWM") - before


def _release_memory() -> None:
    """Return free memory of the allocator to the system: otherwise a forward pass that reuses it would seem to need
    none."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def megabytes(field: str) -> float:
    """A field of this process's status: VmRSS is its memory now, VmHWM the most that it has had.

    Not `ru_maxrss`: a process that is started by a larger one begins with the peak of that one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
