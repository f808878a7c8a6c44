"""Mixing without attention in a fused copy: ResMLP's cross-patch layer and PatchConvNet's branch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.kernels import native
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear, convolve
from patchloom.layers.residual import Branch
from patchloom.models.fused.folding import (
    FoldedLinear,
    Form,
    fold_input,
    fold_output,
    matrix_of,
    norm_parts,
    scale_parts,
)


class FusedCrossPatch(nn.Module):
    """total += gamma (A (alpha x + beta) + b) + lift
    = (gamma alpha) A x + (sums of A's rows) (gamma beta) + b gamma + lift."""

    lift: Tensor | None
    weight: Tensor
    channels: Tensor
    patches: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        mixing = branch.fn
        assert isinstance(mixing, CrossPatchLinear)
        _, alpha, beta = norm_parts(branch.norm)
        gamma, lift = scale_parts(branch.scale)
        dim = max(part.numel() for part in (alpha, beta, gamma))
        weight, bias = mixing.weight, mixing.bias.double()
        # each of D numbers, or of one where norm and scale have one
        vectors = [part.to(weight).expand(dim) for part in (gamma * alpha, gamma * beta, gamma)]
        self.kernels = form.kernels and dim > 1
        self.register_buffer("lift", lift.to(weight).expand(dim).clone() if lift.any() else None)
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("channels", torch.stack([native.padded(v) if self.kernels else v for v in vectors]))
        # A mixes patches and alpha, beta, gamma act on channels, so A (1 beta^T) is the sums of A's rows times beta^T.
        self.register_buffer("patches", torch.stack([weight.double().sum(1), bias]).to(weight))

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if self.kernels and total is x:
            torch.ops.patchloom.cross_patch_(x, self.weight, self.channels, self.patches)
            return x if self.lift is None else x.add_(self.lift)
        scale, across, gain = self.channels[:, : x.shape[-1]]
        rows, shift = self.patches[:, :, None]
        # (N, N) x (B, N, D): the same matrix for every channel.
        mixed = self.weight @ x
        constant = rows * across + shift * gain
        return total.addcmul_(mixed, scale).add_(constant if self.lift is None else constant + self.lift)


class FusedConv(nn.Module):
    """total += scale(conv_branch(norm(x))): PatchConvNet's block on maps, where it is not part of a column."""

    squeeze: Tensor
    squeeze_bias: Tensor
    excite: Tensor
    excite_bias: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        conv = branch.fn
        assert isinstance(conv, ConvBranch)
        self.eps, *affine = norm_parts(branch.norm)
        self.expand = FoldedLinear(*fold_input(*matrix_of(conv.expand), *affine), form)
        self.depthwise = conv.depthwise
        reduce, expand = matrix_of(conv.squeeze_excite.conv_reduce), matrix_of(conv.squeeze_excite.conv_expand)
        padding = -len(reduce[1]) % native.LANES  # zero channels, up to whole vectors
        self.register_buffer("squeeze", F.pad(reduce[0].t(), (0, padding)).contiguous())
        self.register_buffer("squeeze_bias", F.pad(reduce[1], (0, padding)))
        self.register_buffer("excite", F.pad(expand[0].t(), (0, 0, 0, padding)).contiguous())
        self.register_buffer("excite_bias", expand[1].clone())
        self.project = FoldedLinear(*fold_output(conv.project, branch.scale), form)

    def weights(self) -> list[Tensor]:
        """As the kernel takes them, in its order."""
        # windows of 3 x 3 with channels last: (9, D)
        taps, shift = self.depthwise.weight.flatten(1).t(), cast(Tensor, self.depthwise.bias)
        gates = (self.squeeze, self.squeeze_bias, self.excite, self.excite_bias)
        return [*self.expand.packed(), taps, shift, *gates, *self.project.packed()]

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        # Maps are (B, height, width, D), channels last, so that the 1 x 1 convolutions are Linear layers.
        y = torch.ops.aten.gelu_(convolve(self.depthwise, self.expand(x, self.eps, activate=True)))
        squeezed = F.relu(torch.addmm(self.squeeze_bias, y.mean(dim=(1, 2)), self.squeeze))
        return self.project.add_to(total, y, torch.addmm(self.excite_bias, squeezed, self.excite).sigmoid())
