"""MAE's decoder: a light transformer that predicts the pixels of masked patches from the encoded visible ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.layers.attention import SelfAttention
from patchloom.layers.ffn import FFN
from patchloom.layers.init import trunc_normal
from patchloom.layers.norms import make_norm
from patchloom.layers.positions import Grid, grid_sinusoids
from patchloom.layers.residual import Block, Branch, Residual
from patchloom.tasks.pretraining.patches import gather_patches


class PixelDecoder(nn.Module):
    """Predictions (B, M, pixels) for M masked patches, from the tokens (B, prefix + K, inputs) of K visible ones.

    Masked patches are one learned vector each, with the position of their place. The last block computes only them,
    since nothing reads the visible ones after it.
    """

    ROLES = {"mask_token": "token"}
    positions: Tensor

    def __init__(self, inputs: int, dim: int, depth: int, heads: int, grid: Grid, pixels: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.register_buffer("positions", grid_sinusoids(grid, dim)[None], persistent=False)  # (1, N, dim)
        self.blocks = nn.ModuleList(_block(dim, heads) for _ in range(depth))
        self.norm = make_norm("layer", dim)
        self.predict = nn.Linear(dim, pixels)
        self._init_weights()

    def forward(self, tokens: Tensor, kept: Tensor, masked: Tensor) -> Tensor:
        """Predictions for the patches with the indices `masked` (B, M); `kept` (B, K) are those of the tokens, which
        prefix tokens precede."""
        x = torch.cat([self._placeholders(masked), self._visible(tokens, kept)], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, masked.shape[1])
        return self.predict(self.norm(x))

    def _placeholders(self, masked: Tensor) -> Tensor:
        """Masked patches, (B, M, dim)."""
        return self.mask_token + self._positions(masked)

    def _visible(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Prefix tokens and visible patches, (B, prefix + K, dim); prefix tokens have no position."""
        x, prefix = self.project(tokens), tokens.shape[1] - kept.shape[1]
        patches = x[:, prefix:] + self._positions(kept)
        return torch.cat([x[:, :prefix], patches], dim=1)

    def _positions(self, indices: Tensor) -> Tensor:
        return gather_patches(self.positions.expand(len(indices), -1, -1), indices)

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # as published
                nn.init.zeros_(module.bias)
        trunc_normal(self.mask_token)


def _block(dim: int, heads: int) -> Block:
    attention = Branch(make_norm("layer", dim), SelfAttention(dim, heads))
    return Block(Residual([attention]), Residual([Branch(make_norm("layer", dim), FFN(dim, 4 * dim))]))
