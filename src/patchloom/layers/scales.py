"""Scales that multiply a residual branch before it is added: the depth study of CaiT (ICCV Fig. 1, Tables 1 and A.1;
thesis Tables 3.11 and 3.12).

`scale.of(y)` is the scaled branch, (..., D); `scale(total, y)` is total + scale.of(y) in one pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """No scaling: the plain pre-norm residual."""

    def of(self, y: Tensor) -> Tensor:
        """The scaled branch."""
        return y

    def forward(self, total: Tensor, y: Tensor) -> Tensor:
        return total + y


class LayerScale(Scale):
    """diag(gamma) y, one factor per channel (CaiT Eq. 4).

    `init`: "constant" starts every gamma at `value`, "zero" at 0, "uniform" draws U[0, 2 value] (CaiT
    supplement A.3; thesis Table 3.12).
    """

    role = "scale"

    def __init__(self, dim: int, value: float, init: str = "constant", trainable: bool = True) -> None:
        super().__init__()
        start = {
            "constant": lambda: torch.full((dim,), value),
            "zero": lambda: torch.zeros(dim),
            "uniform": lambda: torch.rand(dim) * 2 * value,
        }[init]()
        self.gamma = nn.Parameter(start, requires_grad=trainable)

    def of(self, y: Tensor) -> Tensor:
        return self.gamma * y

    def forward(self, total: Tensor, y: Tensor) -> Tensor:
        # total + gamma * y without storing the product
        return torch.addcmul(total, self.gamma, y)


class AffineScale(LayerScale):
    """gamma y + beta per channel, beta = 0 at the start: ResMLP's Aff after a branch as printed (Eq. 4.2, 4.3)."""

    def __init__(self, dim: int, value: float) -> None:
        super().__init__(dim, value)
        self.beta = nn.Parameter(torch.zeros(dim))

    def of(self, y: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.gamma, y)

    def forward(self, total: Tensor, y: Tensor) -> Tensor:
        return super().forward(total, y) + self.beta


class ScalarScale(Scale):
    """alpha y with one learned number per branch: ReZero and SkipInit start it at 0, the "alpha = eps" column at eps,
    the amended Fixup and T-Fixup at 1."""

    role = "scale"

    def __init__(self, value: float = 0.0, trainable: bool = True) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([value]), requires_grad=trainable)

    def of(self, y: Tensor) -> Tensor:
        return self.alpha * y

    def forward(self, total: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(total, self.alpha, y)


class FixupScale(ScalarScale):
    """alpha y + bias, alpha = 1 and bias = 0 at the start: the end of a branch of Fixup as published.

    Fixup also has such a bias before every layer. Here every Linear already has one, so only the last is added.
    """

    def __init__(self, value: float = 1.0, trainable: bool = True) -> None:
        super().__init__(value, trainable)
        self.bias = nn.Parameter(torch.zeros(1), requires_grad=trainable)

    def of(self, y: Tensor) -> Tensor:
        return super().of(y) + self.bias

    def forward(self, total: Tensor, y: Tensor) -> Tensor:
        return super().forward(total, y) + self.bias


def layerscale_value(depth: int) -> float:
    """The initial LayerScale of a network of `depth` blocks: 0.1 up to 18, 1e-5 up to 24, 1e-6 deeper (thesis
    3.5.1).

    The code of the published CaiT-XXS36 starts at 1e-5, while both papers state 1e-6; this function follows the papers.
    """
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def uniform_drop_rate(depth: int) -> float:
    """The uniform stochastic-depth rate of a DeiT-S-wide network of `depth` blocks: max(0.1 (depth / 12 - 1), 0).

    The thesis prints min(0.1 depth / 12 - 1, 0), which is never positive. This form gives 0, 0.05, 0.1, 0.2 and 0.3 at
    12, 18, 24, 36 and 48 blocks. The tables of the depth study use other rates, such as 0.05 at depth 12.
    """
    return max(0.1 * (depth / 12 - 1), 0.0)
