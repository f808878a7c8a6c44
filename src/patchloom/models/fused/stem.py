"""The stem of a fused copy: its convolutions in one call of a kernel, norms folded in."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from patchloom.kernels import native
from patchloom.layers.inplace import hooked, replaceable
from patchloom.layers.stems import ConvStem, HMLPStem, LinearStem, LinearThenStem, Stem
from patchloom.models.fused.folding import FoldedLinear, Form, batch_norm_parts
from patchloom.models.fused.residual import for_inference


class FusedStem(nn.Module):
    """Convolutions of images (B, C, height, width) -> tokens (B, N, D): norms folded in, maps with channels last."""

    weights: Tensor

    def __init__(self, stages: list[Stage], form: Form) -> None:
        super().__init__()
        self.int8 = form.int8
        layers = [FoldedLinear(*stage.folded(), form) for stage in stages]
        self.register_buffer("weights", native.joined([part for layer in layers for part in layer.packed()]))
        self.stages = [number for stage in stages for number in stage.window()]

    def forward(self, images: Tensor) -> Tensor:
        maps = for_inference(images).permute(0, 2, 3, 1)
        return torch.ops.patchloom.stem(maps, self.weights, self.stages, self.int8).flatten(1, 2)


class Stage(NamedTuple):
    """A convolution of a stem, and the norm of its map if there is one; all but a stem's last go through a GELU."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weights (outputs, side * side * C) and bias of a Linear of windows whose channels are last."""
        # The kernel reads a window row by row with channels last, so the weights have the order (outputs, height,
        # width, C).
        weight = self.conv.weight.permute(0, 2, 3, 1).flatten(1)
        bias = weight.new_zeros(len(weight)) if self.conv.bias is None else self.conv.bias
        if self.norm is None:
            return weight, bias
        # The norm follows the convolution: alpha (W x + b) + beta.
        alpha, beta = batch_norm_parts(self.norm)
        return (alpha[:, None] * weight.double()).to(weight), (alpha * bias.double() + beta).to(bias)

    def window(self) -> tuple[int, int, int, int]:
        """Outputs, side, step and padding."""
        assert isinstance(self.conv.padding, tuple)
        return self.conv.out_channels, self.conv.kernel_size[0], self.conv.stride[0], self.conv.padding[0]


def stages_of(stem: nn.Module) -> list[Stage] | None:
    """The convolutions of a stem with what belongs to them; None if there is a layer of another kind."""
    if not any(replaceable(stem, kind) for kind in (LinearStem, LinearThenStem, HMLPStem, ConvStem)):
        return None
    assert isinstance(stem, Stem)
    if hooked(stem.proj):
        return None
    layers = [stem.proj] if isinstance(stem.proj, nn.Conv2d) else list(stem.proj.children())
    if isinstance(layers[-1], nn.GELU):
        return None  # the kernel has none after the last convolution
    stages: list[Stage] = []
    for layer in layers:
        if replaceable(layer, nn.Conv2d):
            stages.append(Stage(cast(nn.Conv2d, layer), None))
        elif replaceable(layer, nn.BatchNorm2d):
            stages[-1] = Stage(stages[-1].conv, cast(nn.BatchNorm2d, layer))
        elif not replaceable(layer, nn.GELU):
            return None
    return stages
