"""From an image (B, C, height, width) to tokens (B, N, D), N = (height / patch) * (width / patch), row-major."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.layers.inplace import gelu, replaceable
from patchloom.layers.norms import make_norm


class Stem(nn.Module):
    """Convolutions and norms whose output map is flattened to tokens."""

    role = "stem"
    fast = True  # False asks for the plain form

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def plain(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """Channels last throughout: convolutions run faster, the tokens come out without a copy, and every addition
        downstream keeps the layout that norms and Linear layers want."""
        if not self.fast:
            return self.plain(images)
        maps = images.contiguous(memory_format=torch.channels_last)
        before: nn.Module = self
        for layer in self.proj.children():
            maps = gelu(maps, before) if isinstance(layer, nn.GELU) else layer(maps)
            before = layer
        return maps.flatten(2).transpose(1, 2).contiguous()


class LinearStem(Stem):
    """One Linear of each patch's pixels (ViT, DeiT), kept as the convolution that it is published as."""

    proj: nn.Conv2d

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__(nn.Conv2d(in_chans, dim, patch_size, stride=patch_size))

    def forward(self, images: Tensor) -> Tensor:
        """The pixels of each patch in a row, then one matrix product, whose tokens come out dense."""
        if not self.fast or not replaceable(self.proj, nn.Conv2d):
            return self.plain(images)
        weight, bias = self.proj.weight, self.proj.bias
        return F.linear(patch_pixels(images, weight.shape[-1]), weight.flatten(1), bias)


def patch_pixels(images: Tensor, side: int) -> Tensor:
    """(B, C, height, width) -> (B, N, C * side * side): the pixels of each patch in a row."""
    grid = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, C, rows, side, columns, side)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class MapNorm(nn.Module):
    """A norm of the last dimension, applied to a channels-first map."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.norm = make_norm(kind, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def stem_norm(kind: str, dim: int) -> nn.Module:
    return nn.BatchNorm2d(dim) if kind == "batch" else MapNorm(kind, dim)


_STRIDES = {
    "hmlp": {16: (4, 2, 2), 8: (4, 2), 4: (4,), 2: (2,)},
    "conv": {16: (2, 2, 2, 2), 8: (2, 2, 2), 4: (2, 2), 2: (2,)},
}


def stem_strides(kind: str, patch_size: int) -> tuple[int, ...]:
    """The strides of the convolutions of an hMLP or convolutional stem; their product is the patch."""
    if patch_size not in _STRIDES[kind]:
        raise PatchloomError(f"The {kind} stem has patches of 16, 8, 4 or 2 pixels, not {patch_size}.")
    return _STRIDES[kind][patch_size]


class LinearThenStem(Stem):
    """The linear stem followed by one layer: a norm or a GELU ("Three things", Table 7)."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, then: nn.Module) -> None:
        super().__init__(nn.Sequential(nn.Conv2d(in_chans, dim, patch_size, stride=patch_size), then))


class HMLPStem(Stem):
    """Patches grow 4 -> 8 -> 16 without ever overlapping, so a masked patch masks one token ("Three things", sec. 5).

    Convolution, norm, GELU three times, the last without GELU. A smaller patch drops the last stages. In training,
    BatchNorm shares its statistics among patches: independence holds in eval mode, or with LayerNorm.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int, norm: str = "batch") -> None:
        strides = stem_strides("hmlp", patch_size)
        widths = [in_chans] + [dim // 4] * (len(strides) - 1) + [dim]
        layers: list[nn.Module] = []
        for stride, inputs, outputs in zip(strides, widths[:-1], widths[1:], strict=True):
            layers += [nn.Conv2d(inputs, outputs, stride, stride), stem_norm(norm, outputs), nn.GELU()]
        super().__init__(nn.Sequential(*layers[:-1]))


class ConvStem(Stem):
    """3 x 3 convolutions of stride 2, the width doubling up to D, GELU between (PatchConvNet: no norm, no bias)."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, norm: str = "none") -> None:
        stages = len(stem_strides("conv", patch_size))
        widths = [in_chans] + [dim // 2 ** (stages - 1 - i) for i in range(stages)]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False))
            layers += [] if norm == "none" else [stem_norm(norm, outputs)]
            layers.append(nn.GELU())
        super().__init__(nn.Sequential(*layers[:-1]))


def make_stem(kind: str, in_chans: int, dim: int, patch_size: int, norm: str = "none") -> Stem:
    """The stem called `kind`: linear, linear_norm, linear_gelu, hmlp or conv."""
    if kind in _STRIDES and dim < 8:
        raise PatchloomError(f"The {kind} stem needs a dim of at least 8, not {dim}: its first stages are narrower.")
    if kind == "linear":
        return LinearStem(in_chans, dim, patch_size)
    if kind in ("linear_norm", "linear_gelu"):
        then = stem_norm(norm, dim) if kind == "linear_norm" else nn.GELU()
        return LinearThenStem(in_chans, dim, patch_size, then)
    return {"hmlp": HMLPStem, "conv": ConvStem}[kind](in_chans, dim, patch_size, norm)
