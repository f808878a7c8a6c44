"""The feed-forward network: mixes channels, each token on its own."""

from __future__ import annotations

from torch import Tensor, nn

from patchloom.layers.inplace import gelu


class FFN(nn.Module):
    """fc2(GELU(fc1(x))) on (..., D)."""

    role = "ffn"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x), self.fc1))
