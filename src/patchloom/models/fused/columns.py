"""Columns: consecutive blocks of one shape in one call of a kernel, so that a thread keeps its image in the cache."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from patchloom.kernels import native
from patchloom.layers.inplace import replaceable
from patchloom.layers.residual import Block
from patchloom.models.fused.attention import FusedAttention
from patchloom.models.fused.ffn import FusedFFN
from patchloom.models.fused.mixing import FusedConv
from patchloom.models.fused.residual import for_inference
from patchloom.models.patch_network import PatchNetwork

PAIRED = 128  # channels; with fewer, the seven products of a Strassen step cost what eight do (benchmarks/choices.py)


class FusedColumn(nn.Module):
    """Blocks one after another in one call of a kernel; `weights` (blocks, bytes), see `native.joined`."""

    weights: Tensor

    def __init__(self, weights: list[list[Tensor]], dim: int, int8: bool, *eps: float) -> None:
        super().__init__()
        self.int8 = int8
        # a Strassen step adds rows in pairs, so a small row gets the rounding of a large one: LayerNorm bounds that
        # int8 products have no rounding to lose and no Strassen step.
        self.paired = not int8 and min(eps) >= 0 and dim >= PAIRED
        self.register_buffer("weights", torch.stack([native.joined(block) for block in weights]))


class ConvColumn(FusedColumn):
    """PatchConvNet's blocks."""

    def __init__(self, branches: list[FusedConv], int8: bool) -> None:
        first = branches[0]
        super().__init__([branch.weights() for branch in branches], len(first.excite_bias), int8, first.eps)
        self.eps, self.squeezed = first.eps, len(first.squeeze_bias)

    def forward(self, x: Tensor, _: int | None = None) -> Tensor:
        x = for_inference(x)
        torch.ops.patchloom.conv_blocks_(x, self.weights, self.squeezed, self.eps, self.paired, self.int8)
        return x


class AttentionColumn(FusedColumn):
    """Blocks of attention, plain or with talking heads, and FFN."""

    def __init__(self, blocks: list[tuple[FusedAttention, FusedFFN]], int8: bool) -> None:
        weights = [[*first.weights(), *second.weights()] for first, second in blocks]
        attention, ffn = blocks[0]
        super().__init__(weights, attention.proj.outputs, int8, attention.eps, ffn.eps)
        self.alike = self.settings(attention, ffn)

    @staticmethod
    def settings(first: FusedAttention, second: FusedFFN) -> tuple[int, int, int, bool, float, float, float]:
        """Heads, their channels, hidden channels, whether heads are mixed, scale of the scores, eps of both norms."""
        mixed = first.before is not None
        return first.heads, first.inner, second.fc1.outputs, mixed, first.scale, first.eps, second.eps

    def forward(self, x: Tensor, _: int | None = None) -> Tensor:
        x = for_inference(x)
        torch.ops.patchloom.attention_blocks_(x, self.weights, *self.alike, self.paired, self.int8)
        return x


def in_columns(network: PatchNetwork, int8: bool, paired: bool) -> nn.ModuleList:
    """The blocks, those that are alike as one; not the last one where it may be asked for a few tokens alone."""
    # Where tokens join half-way, the blocks before and after see different numbers of tokens.
    if network.join_at not in (None, 0):
        return network.blocks
    # With a class token the last block may compute that token alone, which a column cannot.
    last = [] if network.join_at is None else [network.blocks[-1]]
    column = column_of(network.blocks[: len(network.blocks) - len(last)], int8)
    if column is None:
        return network.blocks
    column.paired &= paired
    return nn.ModuleList([column, *last])


def column_of(blocks: nn.ModuleList, int8: bool) -> FusedColumn | None:
    """Blocks of one branch of PatchConvNet each, or of attention and an FFN, as one; None if they differ."""
    found = [branches_of(block) for block in blocks]
    kinds = {tuple(map(type, branches)) for branches in found}
    if kinds == {(FusedConv,)}:
        convs = [cast(FusedConv, conv) for (conv,) in found]
        alike = {(conv.eps, conv.squeeze.shape) for conv in convs}
        # The depth-wise convolution of the kernel works on whole vectors of channels.
        return ConvColumn(convs, int8) if len(alike) == 1 and len(convs[0].excite_bias) % native.LANES == 0 else None
    if kinds == {(FusedAttention, FusedFFN)}:
        pairs = [(cast(FusedAttention, first), cast(FusedFFN, second)) for first, second in found]
        columns = {AttentionColumn.settings(*pair) for pair in pairs}
        return AttentionColumn(pairs, int8) if len(columns) == 1 else None
    return None


def branches_of(block: nn.Module) -> list[nn.Module]:
    """The branches of a block, one after another; none if some are parallel, or the block is of another kind."""
    parts = [list(getattr(child, "branches", ())) for child in block.children()]
    alone = replaceable(block, Block) and all(len(part) == 1 for part in parts)
    return [branch for part in parts for branch in part] if alone else []
