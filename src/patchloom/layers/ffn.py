"""The feed-forward network: mixes channels, each token on its own."""

from __future__ import annotations

from torch import Tensor, nn

from patchloom.layers.inplace import drop, gelu


class FFN(nn.Module):
    """fc2(GELU(fc1(x))) on (..., D); in training with dropout after the GELU and after fc2 (ViT, DeiT)."""

    role = "ffn"

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = drop(gelu(self.fc1(x), self.fc1), self.dropout, self.training)
        return drop(self.fc2(hidden), self.dropout, self.training)
