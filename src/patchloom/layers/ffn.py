"""The feed-forward network, which mixes the channels of each token separately."""

from __future__ import annotations

from torch import Tensor, nn

from patchloom.layers.inplace import activate, drop


class FFN(nn.Module):
    """fc2(activation(fc1(x))), (..., D) -> (..., D); `activation` is gelu, relu, silu or hardswish.

    In training, dropout follows the activation and fc2 (ViT, DeiT); `hidden_dropout` sets another rate after the
    activation (0 in the Transformer for translation).
    """

    role = "ffn"

    def __init__(
        self,
        dim: int,
        hidden: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        hidden_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.hidden_dropout = dropout if hidden_dropout is None else hidden_dropout
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = drop(activate(self.fc1(x), self.fc1, self.activation), self.hidden_dropout, self.training)
        return drop(self.fc2(hidden), self.dropout, self.training)
