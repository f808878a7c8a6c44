"""Whole training steps (forward, backward, update) beside timm, in one interleaved run.

    python benchmarks/steps.py [--cases NAME ...] [--rounds 9] [--json FILE] [--compare FILE]

Same weights, images and rate of stochastic depth on both sides; timm's blocks with torch's AdamW as it comes. `kept` is
what autograd keeps for the backward pass, without parameters; `share` is of a large product, backward included
as two forwards and nothing taken off for what stochastic depth drops.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import patchloom
import patchloom.compat
import script
from patchloom.benching.timing import interleaved, large_product, ratio, share
from patchloom.recipes.registry import find_recipe
from patchloom.training.optimizers import make_optimizer


@dataclass(frozen=True)
class Case:
    """A network of timm's and ours, shortened where the paper's would take minutes a step."""

    theirs: str
    ours: str
    options: dict[str, Any]  # timm's
    drop_path: float
    batch: int
    asked: float
    asked_kept: float | None = None


CASES = {
    "cait_xxs24, 0.1": Case("cait_xxs24_224", "cait_xxs24", {}, 0.1, 16, 1.3, 0.90),
    "cait_s36 blocks, 0.2": Case("cait_s36_384", "cait_s36", {"depth": 3}, 0.2, 16, 1.45, 0.80),
    "cait_s36 blocks, 0.4": Case("cait_s36_384", "cait_s36", {"depth": 3}, 0.4, 16, 1.7, 0.65),
    "deit3_large blocks, 0.4": Case("deit3_large_patch16_224", "deit3_large", {"depth": 2}, 0.4, 16, 1.55),
}


def networks(case: Case) -> tuple[nn.Module, nn.Module]:
    """(timm's, ours) with equal weights."""
    import timm

    theirs = timm.create_model(
        case.theirs, img_size=224, num_classes=1000, drop_path_rate=case.drop_path, **case.options
    )
    for block in theirs.blocks:  # the same rate in every block, as the papers have it; timm's first one has none
        for name, _ in [*block.named_children()]:
            if name.startswith("drop_path"):
                setattr(block, name, timm.layers.DropPath(case.drop_path))
    ours = patchloom.load(theirs.state_dict(), drop_path=case.drop_path)
    return theirs.train(), ours.train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def bytes_kept(model: nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd holds after one forward, each storage once, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model(images)
    total = sum(storage.nbytes() for storage in held.values())
    del out
    return total


def measure(name: str, case: Case, rounds: int) -> dict[str, Any]:
    theirs, ours = networks(case)
    images, labels = torch.randn(case.batch, 3, 224, 224), torch.arange(case.batch)
    optimizers = (torch.optim.AdamW(theirs.parameters()), make_optimizer(ours, find_recipe("cait")))
    calls: dict[str, Callable[[], object]] = {
        who: lambda model=model, optimizer=optimizer: step(model, optimizer, images, labels)
        for who, model, optimizer in (("timm", theirs, optimizers[0]), ("ours", ours, optimizers[1]))
    }
    times = interleaved({**calls, "product": large_product()}, rounds)
    seconds = {who: statistics.median(times[who]) for who in calls}
    middle, low, high = ratio(times, "timm", "ours")
    kept = statistics.mean(bytes_kept(ours, images) for _ in range(9)) / bytes_kept(theirs, images)
    return {
        "model": name,
        "peer": "timm",
        "batch": case.batch,
        "peer_ms": seconds["timm"] * 1e3,
        "ours_ms": seconds["ours"] * 1e3,
        "share": share(3 * patchloom.complexity(ours).macs * case.batch, seconds["ours"], times["product"]),
        "ratio": middle,
        "low": low,
        "high": high,
        "asked": case.asked,
        "kept": kept,
        "asked_kept": case.asked_kept,
    }


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.cases:
        row = measure(name, CASES[name], options.rounds)
        print(
            f"{name:24} timm {row['peer_ms']:7.0f} ms  ours {row['ours_ms']:7.0f} ms  {row['ratio']:.2f} "
            f"({row['low']:.2f} - {row['high']:.2f}, asked {row['asked']})  kept {row['kept']:.0%}",
            flush=True,
        )
        yield row


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=9)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    script.run(parser.parse_args(), measured)
