"""Normalisations that act on the last dimension of tokens (B, N, D) or maps (B, height, width, D)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYER_NORM_EPS = 1e-6  # as in all published constructors; torch's default is 1e-5


class Affine(nn.Module):
    """Aff(x) = alpha * x + beta per channel (ResMLP, thesis Eq. 4.1).

    It uses no statistics, so it folds into a Linear.
    """

    role = "norm"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm for channels in the last dimension; statistics cover all positions of all images."""

    def forward(self, x: Tensor) -> Tensor:
        # torch's BatchNorm1d expects (samples, D)
        return super().forward(x.flatten(0, -2)).view(x.shape)


def make_norm(kind: str, dim: int) -> nn.Module:
    """Make the norm named `kind` for `dim` channels: layer, affine, batch or none."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
    if kind == "affine":
        return Affine(dim)
    return BatchNorm(dim) if kind == "batch" else nn.Identity()
