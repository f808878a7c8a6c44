"""The feed-forward network: mixes channels, each token on its own."""

from __future__ import annotations

from torch import Tensor, nn

from patchloom.layers.inplace import activate


class FFN(nn.Module):
    """fc2(activation(fc1(x))) on (..., D); `activation` is gelu, relu, silu or hardswish."""

    role = "ffn"

    def __init__(self, dim: int, hidden: int, activation: str = "gelu") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(activate(self.fc1(x), self.fc1, self.activation))
