"""Residuals of a fused copy: branches add to the tokens where they are. x is (B, N, D) tokens or maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError


class FusedResidual(nn.Module):
    """x + the sum of its branches, in place where it may be; parallel branches all read the x that came in."""

    def __init__(self, branches: list[nn.Module], in_place: bool = True) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.in_place = in_place and len(branches) == 1

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        total = x = for_inference(x)
        # with a few queries, or several branches that read x, the sum needs memory of its own
        if queries is not None or not self.in_place:
            total = x[:, :queries].clone()
        # Every branch reads x and adds to `total`. They are the same tensor where the sum may overwrite its input.
        for branch in self.branches:
            total = branch(total, x, queries)
        return total


class PostNorm(nn.Module):
    """norm(residual(x)); without `branches`, so that `columns` leaves its block alone."""

    def __init__(self, residual: FusedResidual, norm: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.norm = norm

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        return self.norm(self.residual(x, queries))


def for_inference(x: Tensor) -> Tensor:
    """x in dense memory that may be written over. Raises PatchloomError where a gradient of it is wanted."""
    if x.requires_grad and torch.is_grad_enabled():
        raise PatchloomError("A fused copy is for inference: take gradients of the network that it was made from.")
    return x.detach().contiguous()
