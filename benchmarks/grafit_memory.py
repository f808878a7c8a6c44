"""The kNN loss of Grafit over a memory of all training images: time of a step and peak memory, beside the plain formula
and pytorch-metric-learning.

    python benchmarks/grafit_memory.py [--images 1281167] [--dim 256] [--batch 256] [--classes 127] [--rounds 5]
                                       [--json FILE] [--compare FILE]

A step is the loss of a batch, its gradient, and the update of the memory. Every contender runs in a process of its own.
One that does not fit into the memory of the machine is tried with half as many images until it does, and ours is
measured at that size too. NCALoss of pytorch-metric-learning computes the same loss but for an image's own row, which
it does not leave out.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import script
from patchloom.benching.inference import megabytes
from patchloom.tasks.retrieval.memory import Memory, plain_neighbour_loss

CONTENDERS = ("ours", "ours bf16", "plain", "metric-learning")
Loss = Callable[[Tensor, Tensor], Tensor]  # unit vectors (B, dim) and their rows


def make_loss(name: str, memory: Memory) -> Loss:
    if name.startswith("ours"):
        return memory.loss
    labels = torch.bucketize(torch.arange(memory.count), torch.tensor(memory.bounds[1:]), right=True)
    if name == "plain":
        return lambda z, rows: plain_neighbour_loss(z, rows, memory.vectors, labels)
    from pytorch_metric_learning.losses import NCALoss

    theirs = NCALoss(softmax_scale=1 / (2 * memory.sigma))  # of squared distances, 2 - 2 cos
    return lambda z, rows: theirs(z, labels[rows], ref_emb=memory.vectors, ref_labels=labels)


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step, the peak memory of this process in MB, and the mean loss of the first step."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(options.classes, (options.images,), generator=generator)
    memory = Memory(labels, options.dim, precision="bf16" if name == "ours bf16" else "float32")
    loss = make_loss(name, memory)
    seconds, first = [], 0.0
    for i in range(options.rounds + 1):
        rows = torch.randperm(options.images, generator=generator)[: options.batch]
        raw = torch.randn(options.batch, options.dim, generator=generator).requires_grad_()
        start = time.perf_counter()
        z = F.normalize(raw, dim=1)
        value = loss(z, rows).mean()
        value.backward()
        memory.update(rows, z.detach())
        if i:
            seconds.append(time.perf_counter() - start)
        else:
            first = float(value.detach())
    return {"seconds": statistics.median(seconds), "memory_mb": megabytes("VmHWM"), "loss": first}


def in_process(name: str, images: int, options: argparse.Namespace) -> dict[str, float] | None:
    """The measurement in a new process; None where memory does not suffice."""
    words = [f"--{key}={getattr(options, key)}" for key in ("dim", "batch", "classes", "rounds", "threads")]
    command = [sys.executable, __file__, "--contender", name, f"--images={images}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: dict[str, float] = json.loads(done.stdout)
        return found
    if "memory" in done.stderr or "MemoryError" in done.stderr or done.returncode < 0:
        return None
    raise SystemExit(done.stderr)


def limit_memory() -> None:
    """Allocations beyond 90 % of the free memory fail, instead of making the machine swap."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    resource.setrlimit(resource.RLIMIT_AS, (int(free * 1024 * 0.9),) * 2)


def peers() -> Iterator[str]:
    yield "plain"
    try:
        import pytorch_metric_learning  # noqa: F401
    except ImportError:
        print("pytorch-metric-learning is not installed: left out", file=sys.stderr)
    else:
        yield "metric-learning"


def largest(name: str, options: argparse.Namespace) -> tuple[int, dict[str, float]]:
    """The most images that fit, and the measurement."""
    images = options.images
    while (found := in_process(name, images, options)) is None:
        images //= 2
        if images < options.batch:
            raise SystemExit(f"{name} does not fit into memory")
    return images, found


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ours in both precisions, then each peer at its largest size beside ours at that size."""
    print("| loss | images | step s | peak MB | mean loss |\n| :-- | --: | --: | --: | --: |")
    own: dict[int, dict[str, float]] = {}
    for name in ("ours", "ours bf16"):
        images, found = largest(name, options)
        show(name, images, found)
        if name == "ours":
            own[images] = found
        yield {"model": name, "batch": options.batch, "size": images, "ours": found}
    for name in peers():
        images, found = largest(name, options)
        show(name, images, found)
        if images not in own:
            same = in_process("ours", images, options)
            assert same is not None
            own[images] = same
            show("ours", images, same)
        rate = found["seconds"] / own[images]["seconds"]
        case = {"model": "ours", "peer": name, "batch": options.batch, "size": images}
        yield {**case, "ratio": rate, "ours": own[images], "theirs": found}


def show(name: str, images: int, found: dict[str, float]) -> None:
    values = f"{found['seconds']:.3f} | {found['memory_mb']:.0f} | {found['loss']:.4f}"
    print(f"| {name} | {images} | {values} |", flush=True)


def main() -> None:
    parser = script.parser(__doc__ or "", rounds=5)
    parser.add_argument("--images", type=int, default=1_281_167, help="vectors in the memory (default: ImageNet's)")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--classes", type=int, default=127)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        torch.set_num_threads(options.threads)
        limit_memory()
        print(json.dumps(measure(options.contender, options)))
    else:
        script.run(options, measured)


if __name__ == "__main__":
    main()
