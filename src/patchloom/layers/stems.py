"""Stems: images (B, C, height, width) -> tokens (B, N, D), with N = (height / patch) * (width / patch) in row-major
order."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.layers.inplace import gelu, replaceable
from patchloom.layers.norms import make_norm


class Stem(nn.Module):
    """Convolutions and norms, followed by flattening of the output map to tokens."""

    role = "stem"
    fast = True  # False selects the plain form

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def plain(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, N, D), in the memory layout of the images."""
        return self.proj(images).flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, N, D), with channels last throughout.

        Convolutions then run faster, flattening needs no copy, and every later addition keeps the layout that norms
        and Linear layers prefer.
        """
        if not self.fast:
            return self.plain(images)
        maps = images.contiguous(memory_format=torch.channels_last)
        before: nn.Module = self
        for layer in self.proj.children():
            # GELU overwrites its input where that is safe, which a call of the module would not do
            maps = gelu(maps, before) if isinstance(layer, nn.GELU) else layer(maps)
            before = layer
        return maps.flatten(2).transpose(1, 2).contiguous()


class LinearStem(Stem):
    """One Linear applied to the pixels of each patch (ViT, DeiT), stored as a convolution as in published weights."""

    proj: nn.Conv2d

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__(nn.Conv2d(in_chans, dim, patch_size, stride=patch_size))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, N, D) by one matrix product, whose output is contiguous."""
        if not self.fast or not replaceable(self.proj, nn.Conv2d):
            return self.plain(images)
        weight, bias = self.proj.weight, self.proj.bias
        return F.linear(patch_pixels(images, weight.shape[-1]), weight.flatten(1), bias)


def patch_pixels(images: Tensor, side: int) -> Tensor:
    """(B, C, height, width) -> (B, N, C * side * side): one row of pixels per patch."""
    grid = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, C, rows, side, columns, side)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class MapNorm(nn.Module):
    """Applies a norm of the last dimension to a channels-first map (B, C, height, width)."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.norm = make_norm(kind, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def stem_norm(kind: str, dim: int) -> nn.Module:
    """Make the norm named `kind` for channels-first maps."""
    return nn.BatchNorm2d(dim) if kind == "batch" else MapNorm(kind, dim)


# patch size -> the strides of the convolutions, whose product is the patch size
_STRIDES = {
    "hmlp": {16: (4, 2, 2), 8: (4, 2), 4: (4,), 2: (2,)},
    "conv": {16: (2, 2, 2, 2), 8: (2, 2, 2), 4: (2, 2), 2: (2,)},
}


def stem_strides(kind: str, patch_size: int) -> tuple[int, ...]:
    """The strides of the convolutions of an hMLP or convolutional stem; their product is the patch size.

    Raises PatchloomError for a patch size that the stem does not support.
    """
    if patch_size not in _STRIDES[kind]:
        raise PatchloomError(f"The {kind} stem supports patch sizes 16, 8, 4 and 2, not {patch_size}.")
    return _STRIDES[kind][patch_size]


class LinearThenStem(Stem):
    """The linear stem followed by one layer: a norm or a GELU ("Three things", Table 7)."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, then: nn.Module) -> None:
        super().__init__(nn.Sequential(nn.Conv2d(in_chans, dim, patch_size, stride=patch_size), then))


class HMLPStem(Stem):
    """Patches grow 4 -> 8 -> 16 and never overlap, so masking a patch masks exactly one token ("Three things", sec. 5).

    Three stages of convolution, norm and GELU; the last has no GELU. Smaller patches have fewer stages. In training,
    BatchNorm shares statistics among patches, so tokens are independent only in eval mode or with LayerNorm.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int, norm: str = "batch") -> None:
        strides = stem_strides("hmlp", patch_size)
        # all stages but the last have D / 4 channels
        widths = [in_chans] + [dim // 4] * (len(strides) - 1) + [dim]
        layers: list[nn.Module] = []
        for stride, inputs, outputs in zip(strides, widths[:-1], widths[1:], strict=True):
            layers += [nn.Conv2d(inputs, outputs, stride, stride), stem_norm(norm, outputs), nn.GELU()]
        super().__init__(nn.Sequential(*layers[:-1]))


class ConvStem(Stem):
    """3 x 3 convolutions of stride 2 with GELU between; the width doubles up to D (PatchConvNet: no norm, no bias)."""

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
    """Make the stem named `kind`: linear, linear_norm, linear_gelu, hmlp or conv.

    Raises PatchloomError if `dim` or `patch_size` does not suit the stem.
    """
    if kind in _STRIDES and dim < 8:
        raise PatchloomError(
            f"The {kind} stem needs dim >= 8, not {dim}: its first stages have a fraction of these channels."
        )
    if kind == "linear":
        return LinearStem(in_chans, dim, patch_size)
    if kind in ("linear_norm", "linear_gelu"):
        then = stem_norm(norm, dim) if kind == "linear_norm" else nn.GELU()
        return LinearThenStem(in_chans, dim, patch_size, then)
    return {"hmlp": HMLPStem, "conv": ConvStem}[kind](in_chans, dim, patch_size, norm)
