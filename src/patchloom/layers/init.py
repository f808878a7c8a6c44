"""Initialisation of parameters: as in the published code, and Fixup and T-Fixup of CaiT's depth study."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.layers.attention import Attention, ClassAttention, SelfAttention
from patchloom.layers.ffn import FFN


def trunc_normal(tensor: Tensor) -> None:
    """Fill with N(0, 0.02^2), truncated at -2 and 2: the initialisation of every Linear, token and position.

    The bounds are absolute, 100 standard deviations away, as in the published code; they practically never apply.
    """
    nn.init.trunc_normal_(tensor, std=0.02, a=-2.0, b=2.0)


def init_module(module: nn.Module) -> None:
    """Initialise one module, for `model.apply` (children first); a layer may define `init_weights` to do it itself.

    Convolutions keep torch's default initialisation, as in the published code.
    """
    init_weights = getattr(module, "init_weights", None)
    if callable(init_weights):
        init_weights()
    elif isinstance(module, nn.Linear):
        trunc_normal(module.weight)
        nn.init.zeros_(module.bias)


@torch.no_grad()
def init_fixup(blocks: nn.ModuleList, *heads: nn.Module) -> None:
    """Fixup (Zhang et al. 2019): the last layer of every branch and all heads start at 0; the layers before the last
    are scaled by L^(-1 / (2m - 2)), with L branches in total and m = 2 layers in each, so by L^(-1/2)."""
    branches = [m for m in blocks.modules() if isinstance(m, Attention | FFN)]
    for branch in branches:
        last, first = (branch.fc2, [branch.fc1]) if isinstance(branch, FFN) else (branch.proj, _projections(branch))
        nn.init.zeros_(last.weight)
        for layer in first:
            layer.weight.mul_(len(branches) ** -0.5)
    for head in heads:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)


@torch.no_grad()
def init_t_fixup(blocks: nn.ModuleList) -> None:
    """T-Fixup (Huang et al. 2020) for an encoder: Xavier initialisation, with values, output projections and FFN
    weights scaled by 0.67 N^(-1/4) for N blocks. Its factor for word embeddings does not apply to images."""
    factor = 0.67 * len(blocks) ** -0.25
    for module in blocks.modules():
        if isinstance(module, FFN):
            _xavier(module.fc1.weight, factor)
            _xavier(module.fc2.weight, factor)
        elif isinstance(module, Attention):
            for layer in _projections(module):
                parts = layer.weight.chunk(layer.out_features // layer.in_features)  # a fused qkv is three matrices
                for part in parts:
                    _xavier(part, 1.0)
            _values(module).mul_(factor)
            _xavier(module.proj.weight, factor)


def _values(attention: Attention) -> Tensor:
    """The weight of the value projection, (D, D): the last third of a fused qkv."""
    if isinstance(attention, SelfAttention):
        return attention.qkv.weight.chunk(3)[2]
    assert isinstance(attention, ClassAttention)
    return attention.v.weight


def _projections(attention: Attention) -> list[nn.Linear]:
    """The layers that compute q, k and v."""
    if isinstance(attention, SelfAttention):
        return [attention.qkv]
    assert isinstance(attention, ClassAttention)
    return [attention.q, attention.k, attention.v]


def _xavier(weight: Tensor, factor: float) -> None:
    nn.init.xavier_uniform_(weight)
    weight.mul_(factor)
