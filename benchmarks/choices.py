"""Where each rewrite begins to pay: what the rules in the code were chosen by.

    python benchmarks/choices.py [--rounds 31] [--json FILE] [--compare FILE]

`few queries`: our attention kernel beside torch's, for as many queries as each row says, of 197 keys (FEW_QUERIES of
models/fused.py). `no keys`: attention of so many queries times heads without keys and values beside one with them
(FewQueries of models/fused.py), of 384 channels. `drop rate`: a training step of a DeiT-S block that computes only the
samples that stochastic depth keeps beside one that computes all (`kept_alone` of layers/residual.py). `talking heads`:
our kernel beside torch's operators, forward and backward (`attend_fast` of layers/attention.py). `pairs`: blocks of so
many channels with seven products of halves beside eight (PAIRED of models/fused.py). Above 1 the rewrite is the faster
one; about 1 where the rule chooses the plain form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
import script
from patchloom.benching.timing import interleaved, ratio
from patchloom.kernels import native  # noqa: F401 (it registers the operators)
from patchloom.layers import attention
from patchloom.layers.residual import Branch


def row(
    rule: str, batch: int, plain: Callable[[], object], rewrite: Callable[[], object], rounds: int
) -> dict[str, Any]:
    middle, low, high = ratio(interleaved({"plain": plain, "rewrite": rewrite}, rounds), "plain", "rewrite")
    print(f"{rule:28} batch {batch:2}  {middle:.2f} ({low:.2f} - {high:.2f})", flush=True)
    return {"model": rule, "peer": "plain form", "batch": batch, "ratio": middle, "low": low, "high": high}


@torch.inference_mode()
def few_queries(queries: int, batch: int, rounds: int) -> dict[str, Any]:
    k, v = torch.randn(2, batch, 6, 197, 64)
    q = torch.randn(batch, 6, queries, 64)
    return row(
        f"few queries, {queries}",
        batch,
        lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),
        lambda: torch.ops.patchloom.attention(q, k, v, 0.125, False),
        rounds,
    )


@torch.inference_mode()
def no_keys(queries: int, heads: int, batch: int, rounds: int) -> dict[str, Any]:
    network = patchloom.fuse(patchloom.create_model("deit_small", depth=1, heads=heads).eval())
    branch = network.blocks[-1].mixing.branches[0]
    x = torch.randn(batch, 197, 384)
    total = x[:, :queries].clone()

    def run(most: int) -> Tensor:
        branch.few.most = most
        return branch(total, x, queries)

    return row(f"no keys, {queries} x {heads}", batch, lambda: run(0), lambda: run(queries), rounds)


def step_of(block: nn.Module, x: Tensor, switch: Any, name: str, value: object) -> Callable[[], None]:
    """A forward and a backward with a switch of the code set."""

    def step() -> None:
        before = getattr(switch, name)
        setattr(switch, name, value)
        block(x).sum().backward()
        setattr(switch, name, before)

    return step


def drop_rate(rate: float, batch: int, rounds: int) -> dict[str, Any]:
    block = patchloom.create_model("deit_small", depth=1, drop_path=rate).blocks[0].train()
    for branch in (module for module in block.modules() if isinstance(module, Branch)):
        branch.drop_path.rate = rate
    x = torch.randn(batch, 197, 384)
    plain, kept = (step_of(block, x, Branch, "kept_alone", alone) for alone in (False, True))
    return row(f"drop rate, {rate}", batch, plain, kept, rounds)


def talking(name: str, batch: int, rounds: int) -> dict[str, Any]:
    block = patchloom.create_model(name, depth=1).blocks[0].train()
    x = torch.randn(batch, 196, block.mixing.branches[0].norm.normalized_shape[0])
    plain = step_of(block, x, attention, "takes_kernels", lambda _: False)
    return row(f"talking heads, {name}", batch, plain, lambda: block(x).sum().backward(), rounds)


@torch.inference_mode()
def pairs(name: str, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    heads, grid = ({}, (14, 14)) if name.startswith("patchconvnet") else ({"heads": dim // 64}, (196,))
    network = patchloom.fuse(patchloom.create_model(name, dim=dim, depth=7, **heads).eval())
    column, x = network.blocks[0], torch.randn(batch, *grid, dim)

    def run(paired: bool) -> Tensor:
        column.paired = paired
        return column(x.clone())

    return row(f"pairs, {name}, {dim}", batch, lambda: run(False), lambda: run(True), rounds)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for queries in (1, 2, 4, 6, 8, 16, 197):
        yield few_queries(queries, 8, options.rounds)
    for queries, heads in ((1, 6), (2, 6), (16, 6), (32, 6), (1, 1), (96, 1), (150, 1)):
        yield no_keys(queries, heads, 8, options.rounds)
    for batch in (1, 4, 16):
        for rate in (0.02, 0.1, 0.4):
            yield drop_rate(rate, batch, options.rounds)
    for name in ("cait_xxs24", "cait_s24"):
        for batch in (1, 8):
            yield talking(name, batch, options.rounds)
    for batch in (1, 8):
        for name in ("deit_small", "cait_s24", "patchconvnet_s60"):
            for dim in (64, 128, 192, 256, 384, 512, 768, 1024):
                yield pairs(name, dim, batch, options.rounds)


if __name__ == "__main__":
    script.run(script.parser(__doc__, rounds=31).parse_args(), measured)
