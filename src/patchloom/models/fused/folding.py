"""Norms and scales folded into the Linear layers beside them, in double precision, and the Linear of a fused copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.kernels import native
from patchloom.layers.norms import Affine, BatchNorm
from patchloom.layers.scales import AffineScale, FixupScale, LayerScale, ScalarScale, Scale


class Form(NamedTuple):
    """What a part of a fused copy computes with.

    kernels        the C++ kernels
    int8           int8 matmul in these kernels
    few            a layout for few queries: the last block and what comes after it
    side_by_side   parallel branches of the same shape as one wider branch
    """

    kernels: bool
    int8: bool = False
    few: bool = False
    side_by_side: bool = True


class FoldedLinear(nn.Module):
    """A Linear whose weights are laid out as the kernel wants them, or as they are for torch."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, form: Form) -> None:
        super().__init__()
        self.outputs = len(weight)
        self.kernels = form.kernels
        if form.kernels:
            weight, bias = native.pack_int8(weight, bias) if form.int8 else native.pack(weight, bias)
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("bias", bias.contiguous())

    def packed(self) -> tuple[Tensor, Tensor]:
        """Weights and bias as the kernel takes them."""
        return self.weight, self.bias

    def forward(self, x: Tensor, eps: float = -1.0, activate: bool = False) -> Tensor:
        """x (..., D) -> (..., outputs), of x normalised when eps >= 0; through a GELU when `activate`."""
        return self._apply_part(x, self.weight, self.bias, self.outputs, eps, activate)

    def part(self, x: Tensor, first: int, last: int, eps: float = -1.0) -> Tensor:
        """Outputs `first` to `last` alone, (..., last - first)."""
        if not self.kernels:
            return self._apply_part(x, self.weight[first:last], self.bias[first:last], last - first, eps, False)
        width = self.bias.shape[-1]
        # Packed weights lie in panels of `width` outputs.
        if first % width or last % width:  # within a panel: there is no part of one
            return self(x, eps)[..., first:last]
        panels = slice(first // width, last // width)
        return self._apply_part(x, self.weight[panels], self.bias[panels], last - first, eps, False)

    def _apply_part(self, x: Tensor, weight: Tensor, bias: Tensor, outputs: int, eps: float, activate: bool) -> Tensor:
        if self.kernels:
            return torch.ops.patchloom.linear(x, weight, bias, outputs, eps, activate)
        y = F.linear(x if eps < 0 else F.layer_norm(x, x.shape[-1:], eps=eps), weight, bias)
        return torch.ops.aten.gelu_(y) if activate else y

    def add_to(self, total: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """total += Linear(x), or Linear(gate * x) with a gate (B, D)."""
        if self.kernels:
            torch.ops.patchloom.linear_(total, x, self.weight, self.bias, gate)
            return total
        if gate is not None:
            x = x * gate.view(len(gate), *(1,) * (x.ndim - 2), gate.shape[-1])
        return total.add_(F.linear(x, self.weight, self.bias))


_ONE_AND_ZERO = torch.ones((), dtype=torch.double), torch.zeros((), dtype=torch.double)  # scalars go to any device


def norm_parts(norm: nn.Module) -> tuple[float, Tensor, Tensor]:
    """(eps, alpha, beta): alpha * x + beta, of the normalised x when eps >= 0; in double precision."""
    if isinstance(norm, nn.LayerNorm):
        one, zero = _ONE_AND_ZERO
        alpha, beta = (part if part is None else part.double() for part in (norm.weight, norm.bias))
        return norm.eps, one if alpha is None else alpha, zero if beta is None else beta
    if isinstance(norm, Affine):
        return -1.0, norm.alpha.double(), norm.beta.double()
    if isinstance(norm, BatchNorm):
        return -1.0, *batch_norm_parts(norm)
    assert isinstance(norm, nn.Identity), type(norm)
    return -1.0, *_ONE_AND_ZERO


def batch_norm_parts(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """(alpha, beta) of the running statistics, in double precision."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    # BatchNorm in eval mode is affine: (x - mean) / sqrt(var + eps) * weight + bias. Double precision, because the
    # product with a weight rounds a second time.
    alpha = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return alpha, norm.bias.double() - norm.running_mean.double() * alpha


def scale_parts(scale: Scale) -> tuple[Tensor, Tensor]:
    """(gamma, bias) of what multiplies a branch, in double precision."""
    one, zero = _ONE_AND_ZERO
    if isinstance(scale, LayerScale):
        return scale.gamma.double(), scale.beta.double() if isinstance(scale, AffineScale) else zero
    if isinstance(scale, ScalarScale):
        return scale.alpha.double(), scale.bias.double() if isinstance(scale, FixupScale) else zero
    return one, zero


def fold_input(weight: Tensor, bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """W (alpha x + beta) + b as one Linear of x."""
    wide = weight.double()
    # W (alpha x + beta) + b = (W diag(alpha)) x + (W beta + b)
    return (wide * alpha).to(weight), (bias.double() + (wide * beta).sum(dim=1)).to(bias)


def fold_output(layer: nn.Linear | nn.Conv2d, scale: Scale) -> tuple[Tensor, Tensor]:
    """scale(W x + b) as one Linear of x."""
    weight, bias = matrix_of(layer)
    gamma, lift = scale_parts(scale)
    # gamma (W x + b) + lift = (diag(gamma) W) x + (gamma b + lift)
    return (weight.double().t() * gamma).t().to(weight), (bias.double() * gamma + lift).to(bias)


def stack_inputs(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Linear layers of the same x as one, whose outputs are theirs in a row."""
    weights, biases = zip(*layers, strict=True)
    return torch.cat(weights), torch.cat(biases)


def stack_outputs(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sum of Linear layers as one, of their inputs in a row."""
    weights, biases = zip(*layers, strict=True)
    return torch.cat(weights, dim=1), torch.stack(biases).double().sum(dim=0).to(biases[0])


def matrix_of(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Weights (outputs, inputs) and bias of a Linear, or of a convolution that is one."""
    assert layer.bias is not None
    return layer.weight.flatten(1), layer.bias
