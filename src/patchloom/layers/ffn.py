"""The feed-forward network, which mixes the channels of each token separately."""

from __future__ import annotations

from torch import Tensor, nn

from patchloom.layers.inplace import activate, drop


class FFN(nn.Module):
    """fc2(activation(fc1(x))), (..., D) -> (..., D); `activation` is gelu, relu, silu or hardswish.

    In training, dropout follows the activation and fc2 (ViT, DeiT).
    """

    role = "ffn"

    def __init__(self, dim: int, hidden: int, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = drop(activate(self.fc1(x), self.fc1, self.activation), self.dropout, self.training)
        return drop(self.fc2(hidden), self.dropout, self.training)
