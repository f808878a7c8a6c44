"""Mixing across patches without attention: ResMLP's cross-patch layers (thesis Table 4.3) and PatchConvNet's branch.

Tokens are (B, N, D) with N = height * width in row-major order; maps are (B, height, width, D). Channels stay last, so
that a convolution gets a channels-last image and neither its input nor its output is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.inplace import activate, gelu, may_overwrite

SQUEEZE = 0.25  # reduced width of PatchConvNet's squeeze-excite, as a fraction of the width


class CrossPatchLinear(nn.Linear):
    """A Linear over patches: out[:, i] = sum_j W[i, j] x[:, j] + b[i] (ResMLP Eq. 4.2)."""

    role = "mixing"
    fast = True  # False selects the plain form

    def __init__(self, patches: int) -> None:
        super().__init__(patches, patches)

    def plain(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D), with the patches moved to the last dimension and back."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D): W x + b in the layout of the tokens, without the two transposes of the plain form."""
        if not self.fast:
            return self.plain(x)
        # expand makes no copy: every image is multiplied by the same W
        return torch.baddbmm(self.bias[:, None], self.weight.expand(x.shape[0], -1, -1), x)


class CrossPatchFFN(nn.Module):
    """Two Linear layers over patches with an activation between them, (B, N, D) -> (B, N, D).

    The hidden layer has 4 N units, as in MLP-Mixer.
    """

    role = "mixing"

    def __init__(self, patches: int, ratio: int = 4, activation: str = "gelu") -> None:
        super().__init__()
        self.fc1 = nn.Linear(patches, ratio * patches)
        self.fc2 = nn.Linear(ratio * patches, patches)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(activate(self.fc1(x.transpose(1, 2)), self.fc1, self.activation)).transpose(1, 2)


class GridConv(nn.Module):
    """A 3 x 3 convolution on the grid of patches, (B, N, D) -> (B, N, D).

    `kind` is "conv", "depthwise", or "separable" (depth-wise, then 1 x 1).
    """

    role = "mixing"

    def __init__(self, dim: int, grid: tuple[int, int], kind: str) -> None:
        super().__init__()
        self.grid = grid
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=1 if kind == "conv" else dim)
        self.pointwise = Pointwise(dim, dim) if kind == "separable" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(convolve(self.conv, x.unflatten(1, self.grid)).flatten(1, 2))


class Pointwise(nn.Conv2d):
    """A 1 x 1 convolution of channels-last input (..., D), computed as a Linear over channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        # (outputs, inputs, 1, 1) -> (outputs, inputs)
        return F.linear(x, self.weight.flatten(1), self.bias)


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply `conv` to a map (B, height, width, D): the permutes are views of a channels-last image, not copies."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class SqueezeExcite(nn.Module):
    """x * sigmoid(W2 relu(W1 mean(x))) on maps (B, height, width, D), with the mean over the map.

    In inference x is overwritten.
    """

    def __init__(self, dim: int, reduced: int) -> None:
        super().__init__()
        self.conv_reduce = Pointwise(dim, reduced)
        self.conv_expand = Pointwise(reduced, dim)

    def gate(self, x: Tensor) -> Tensor:
        """One factor per image and channel, (B, 1, 1, D)."""
        return self.conv_expand(F.relu(self.conv_reduce(x.mean(dim=(1, 2), keepdim=True)))).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gate(x)) if may_overwrite(self) else x * self.gate(x)


class ConvBranch(nn.Module):
    """PatchConvNet's trunk branch on maps (B, height, width, D), thesis Fig. 5.1:
    1 x 1, GELU, depth-wise 3 x 3, GELU, squeeze-excite, 1 x 1."""

    role = "mixing"
    fast = True  # False selects the plain form

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.expand = Pointwise(dim, dim)
        self.depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.squeeze_excite = SqueezeExcite(dim, round(dim * SQUEEZE))
        self.project = Pointwise(dim, dim)

    def plain(self, x: Tensor) -> Tensor:
        """(B, height, width, D) -> the same shape; every step is a convolution of a channels-first image."""
        x = x.permute(0, 3, 1, 2)
        x = F.gelu(F.conv2d(x, self.expand.weight, self.expand.bias))
        x = F.gelu(self.depthwise(x))
        squeeze, excite = self.squeeze_excite.conv_reduce, self.squeeze_excite.conv_expand
        gate = F.relu(F.conv2d(x.mean(dim=(2, 3), keepdim=True), squeeze.weight, squeeze.bias))
        x = x * F.conv2d(gate, excite.weight, excite.bias).sigmoid()
        return F.conv2d(x, self.project.weight, self.project.bias).permute(0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fast:
            return self.plain(x)
        x = gelu(self.expand(x), self.expand)
        x = gelu(convolve(self.depthwise, x), self.depthwise)
        return self.project(self.squeeze_excite(x))


class ClassMLP(nn.Linear):
    """ResMLP's class-MLP: one Linear over all tokens replaces class-attention, (B, 1 + N, D) -> (B, 1, D)."""

    role = "pool"

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens, 1)

    def forward(self, x: Tensor, queries: int = 1) -> Tensor:
        assert queries == 1, "a class-MLP has one class token"
        return super().forward(x.transpose(1, 2)).transpose(1, 2)
