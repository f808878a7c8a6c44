"""What a network computes before its head: tokens, and where each of them stands in the image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from patchloom.errors import PatchloomError


class TokenLayout(NamedTuple):
    """Where things are in a row of tokens: first `prefix` tokens, then height * width patches, row-major."""

    prefix: int
    height: int
    width: int

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along the height and along the width."""
        return self.height, self.width


@dataclass(frozen=True)
class Features:
    """Tokens (B, prefix + N, D) with their layout.

    `kept` (B, K) has the indices of the patches that were computed, where not all were: there are K patches instead of
    N then, and `layout` is still that of the whole image.
    """

    tokens: Tensor
    layout: TokenLayout
    kept: Tensor | None = None

    @property
    def prefix(self) -> Tensor:
        """(B, prefix, D): class token, then distillation token; or one token per class; or none."""
        return self.tokens[:, : self.layout.prefix]

    @property
    def patches(self) -> Tensor:
        """(B, N, D), or (B, K, D) where only some were kept."""
        return self.tokens[:, self.layout.prefix :]

    @property
    def grid(self) -> Tensor:
        """The patches as a map (B, D, height, width). Raises PatchloomError where only some patches were kept."""
        if self.kept is not None:
            raise PatchloomError(
                f"Only {self.kept.shape[1]} of {self.layout.height * self.layout.width} patches were computed: they "
                "do not fill a map: use `patches`, with their indices in `kept`."
            )
        return self.patches.transpose(1, 2).unflatten(2, self.layout.grid)


def block_indices(blocks: Any, count: int, name: str) -> list[int]:
    """Indices of blocks counted from 0, of indices that may count from the end. Refuses those that are not there."""
    listed = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str | Tensor) else []
    if not listed or any(not isinstance(i, int) or not -count <= i < count for i in listed):
        raise PatchloomError(
            f"blocks is a list of blocks of {name}, which has {count} of them, counted from 0; not {blocks!r}."
        )
    return [i % count for i in listed]
