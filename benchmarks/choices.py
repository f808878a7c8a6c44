"""Where each rewrite begins to pay: what the rules in the code were chosen by.

    python benchmarks/choices.py [--rounds 31] [--json FILE] [--compare FILE]

Above 1 the rewrite is the faster one. Every row computes both forms, whatever the rule would choose.

few queries      our attention kernel beside torch's, of so many queries to 197 keys (FEW_QUERIES of models/fused.py)
no keys          so many queries x heads without keys and values, of 384 channels, in a fused copy and in training
                 (few_queries of layers/attention.py)
drop rate        a step of a DeiT-S block that computes only the samples kept (Branch of layers/residual.py)
talking heads    our kernel beside torch's operators, a step of a block (enough_images of layers/attention.py)
layout           a layer's fast form beside its plain one, a step and without gradients, up to channels that lie side by
                 side, as all that follows wants them (layers/{stems,mixing}.py)
AdamW            torch's fused form beside the one that it takes by itself (training/optimizers.py)
pairs            blocks of so many channels with one Strassen step beside a plain product (PAIRED of models/fused.py)
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
from patchloom.layers.attention import ClassAttention
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear
from patchloom.layers.residual import Branch
from patchloom.layers.stems import ConvStem, HMLPStem, LinearStem


def row(
    rule: str, batch: int, plain: Callable[[], object], rewrite: Callable[[], object], rounds: int
) -> dict[str, Any]:
    middle, low, high = ratio(interleaved({"plain": plain, "rewrite": rewrite}, rounds), "plain", "rewrite")
    print(f"{rule:32} batch {batch:2}  {middle:.2f} ({low:.2f} - {high:.2f})", flush=True)
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


Setting = tuple[Any, str, object]  # of a class or a module, what to set while it runs


def step_of(run: Callable[[], Tensor], *settings: Setting) -> Callable[[], None]:
    """A forward, and a backward where gradients are on, with switches of the code set."""

    def step() -> None:
        before = [getattr(owner, name) for owner, name, _ in settings]
        for owner, name, value in settings:
            setattr(owner, name, value)
        out = run().sum()
        if out.requires_grad:
            out.backward()
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)

    return step


def no_keys_in_training(queries: int, heads: int, batch: int, rounds: int) -> dict[str, Any]:
    layer, x = ClassAttention(384, heads), torch.randn(batch, 197, 384, requires_grad=True)
    always = (attention, "few_queries", lambda *_: queries)
    plain, rewrite = (step_of(lambda: layer(x, queries), always, (layer, "fast", fast)) for fast in (False, True))
    return row(f"no keys, {queries} x {heads}, training", batch, plain, rewrite, rounds)


def drop_rate(rate: float, batch: int, rounds: int) -> dict[str, Any]:
    block = patchloom.create_model("deit_small", depth=1, drop_path=rate).blocks[0].train()
    for branch in (module for module in block.modules() if isinstance(module, Branch)):
        branch.drop_path.rate = rate
    x = torch.randn(batch, 197, 384)
    plain, kept = (step_of(lambda: block(x), (Branch, "fast", fast), (Branch, "least", 1)) for fast in (False, True))
    return row(f"drop rate, {rate}", batch, plain, kept, rounds)


def talking(name: str, batch: int, rounds: int) -> dict[str, Any]:
    block = patchloom.create_model(name, depth=1).blocks[0].train()
    x = torch.randn(batch, 196, block.mixing.branches[0].norm.normalized_shape[0])
    plain = step_of(lambda: block(x), (attention, "takes_kernels", lambda _: False))
    rewrite = step_of(lambda: block(x), (attention, "enough_images", lambda _: True))
    return row(f"talking heads, {name}", batch, plain, rewrite, rounds)


def layout(name: str, layer: nn.Module, x: Tensor, training: bool, rounds: int) -> dict[str, Any]:
    plain, rewrite = (step_of(lambda: layer(x).contiguous(), (layer, "fast", fast)) for fast in (False, True))
    with torch.set_grad_enabled(training):
        return row(f"layout, {name}, {'training' if training else 'inference'}", len(x), plain, rewrite, rounds)


def adamw(name: str, rounds: int) -> dict[str, Any]:
    optimizers = []
    for fused in (None, True):
        parameters = list(patchloom.create_model(name).parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizers.append(torch.optim.AdamW(parameters, fused=fused))
    return row(f"AdamW, {name}", 1, optimizers[0].step, optimizers[1].step, rounds)


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
    for queries, heads in ((1, 6), (2, 6), (16, 6), (32, 6), (1, 1), (96, 1), (150, 1)):
        yield no_keys_in_training(queries, heads, 8, options.rounds)
    for batch in (1, 4, 16):
        for rate in (0.02, 0.1, 0.4):
            yield drop_rate(rate, batch, options.rounds)
    for name in ("cait_xxs24", "cait_s24"):
        for batch in (1, 8):
            yield talking(name, batch, options.rounds)
    images, maps = torch.randn(8, 3, 224, 224), torch.randn(8, 14, 14, 384)
    for training in (False, True):
        yield layout("linear stem", LinearStem(3, 384, 16), images, training, options.rounds)
        yield layout("hMLP stem", HMLPStem(3, 384, 16), images, training, options.rounds)
        yield layout("conv stem", ConvStem(3, 384, 16), images, training, options.rounds)
        yield layout("cross-patch", CrossPatchLinear(196), maps.flatten(1, 2), training, options.rounds)
        yield layout("conv branch", ConvBranch(384), maps, training, options.rounds)
    for name in ("cait_xxs24", "deit_small"):
        yield adamw(name, options.rounds)
    for batch in (1, 8):
        for name in ("deit_small", "cait_s24", "patchconvnet_s60"):
            for dim in (64, 128, 192, 256, 384, 512, 768, 1024):
                yield pairs(name, dim, batch, options.rounds)


if __name__ == "__main__":
    script.run(script.parser(__doc__, rounds=31).parse_args(), measured)
