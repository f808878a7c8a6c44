"""Heads: from what a network reads, (B, D) or one token per class, to logits (B, classes)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.layers.init import trunc_normal


class PerClassHead(nn.Module):
    """One vector per class, applied to that class's own token: (B, classes, D) -> (B, classes) (PatchConvNet 5.2.1)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def init_weights(self) -> None:
        trunc_normal(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(dim=-1) + self.bias


class MLPHead(nn.Sequential):
    """Linear, BatchNorm, ReLU, linear: (B, D) -> (B, classes) (Grafit 2.4.6)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, num_classes))
