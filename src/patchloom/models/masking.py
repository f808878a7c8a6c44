"""Which patches the blocks see: some replaced by a mask token (BeiT), some left out altogether (MAE).

Both act on patch embeddings (B, N, D), after the stem. A stem whose patches do not overlap (linear, hMLP) then lets
nothing of a hidden patch through; in a convolutional stem its neighbours have seen it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.errors import PatchloomError


class Visible(NamedTuple):
    """The choice of patches of one call; all None is every patch as it is."""

    mask: Tensor | None = None  # (B, N) bool, True: hidden
    mask_token: Tensor | None = None  # D numbers; None: zeros
    keep: Tensor | None = None  # (B, K) indices of patches


EVERYTHING = Visible()


def hide(x: Tensor, mask: Tensor, token: Tensor | None) -> Tensor:
    """Embeddings (B, N, D) with the mask token, or zeros, where `mask` (B, N) is True. Gradients reach the token."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise PatchloomError(
            f"mask is a bool tensor {tuple(x.shape[:2])}, True where a patch is hidden, not {_describe(mask)}."
        )
    if token is None:
        return x.masked_fill(mask[:, :, None], 0.0)
    if not isinstance(token, Tensor) or token.numel() != x.shape[-1]:
        raise PatchloomError(f"mask_token is a tensor of {x.shape[-1]} numbers, not {_describe(token)}.")
    return torch.where(mask[:, :, None], token.reshape(-1).to(x.dtype), x)


def gather_kept(x: Tensor, keep: Tensor) -> Tensor:
    """Only the tokens of the kept patches: (B, N, D) -> (B, K, D), in the order of `keep` (B, K)."""
    sound = isinstance(keep, Tensor) and keep.ndim == 2 and len(keep) == len(x) and keep.shape[1] > 0
    if not sound or keep.dtype not in (torch.int64, torch.int32):
        raise PatchloomError(
            f"keep holds patch indices, an integer tensor ({len(x)}, K) with K of at least 1, not {_describe(keep)}."
        )
    # on an accelerator this comparison would wait for the device, which raises an error of its own
    if keep.is_cpu and not torch.compiler.is_compiling() and not 0 <= int(keep.min()) <= int(keep.max()) < x.shape[1]:
        raise PatchloomError(
            f"keep holds patch indices from 0 to {x.shape[1] - 1}, not {int(keep.min())} to {int(keep.max())}."
        )
    return x.gather(1, keep.long()[:, :, None].expand(-1, -1, x.shape[-1]))


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
