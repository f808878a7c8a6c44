"""The fused copy as a network of its own: inference alone, in the precision and for the processor it was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.kernels.libraries import instruction_set
from patchloom.layers.inplace import hooked
from patchloom.models.features import Features, TokenLayout
from patchloom.models.masking import EVERYTHING, Visible
from patchloom.models.patch_network import PatchNetwork


class FusedNetwork(PatchNetwork):
    """A network whose blocks were fused, made by `fuse`; it takes over all that `network`, a copy of its own, has.

    `writes_over`: blocks write over what they are given. `instructions`: those of the processor that the weights are
    laid out for; None where no kernel is used.
    """

    fused = True  # for layers, which cannot import this class

    def __init__(self, network: PatchNetwork, writes_over: bool, instructions: str | None) -> None:
        nn.Module.__init__(self)
        # parameters, layers and settings as they are: nothing is built again
        self.__dict__.update(network.__dict__)
        self.writes_over = writes_over
        self.instructions = instructions

    def train(self, mode: bool = True) -> FusedNetwork:
        if mode:
            raise PatchloomError("A fused copy is for inference: train the network that it was made from.")
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedNetwork:
        """What `to`, `half`, `cuda` and the like do: packed weights cannot follow to another type or device."""
        # Four dimensions, so that a change of memory format shows in the strides too.
        one = next(self.parameters()).new_empty(1, 2, 2, 2)
        after = fn(one)
        if (after.dtype, after.device, after.stride()) != (one.dtype, one.device, one.stride()):
            here = f"{one.dtype} on {one.device}"
            raise PatchloomError(f"A fused copy stays {here}: convert the network that it was made from, then fuse it.")
        super()._apply(fn, recurse)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickled copy may be read on another machine: the layout of packed weights depends on the vector width.
        if self.instructions not in (None, instruction_set()):
            found = f"This fused copy is laid out for {self.instructions}, and this processor has {instruction_set()}"
            raise PatchloomError(f"{found}: fuse its network here.")

    def _tokens(self, images: Tensor, layout: TokenLayout, whole: bool, visible: Visible = EVERYTHING) -> Tensor:
        if self.writes_over and any(hooked(m) for part in (self.stem, self.blocks, self.pool) for m in part.modules()):
            raise PatchloomError(
                "A fused copy writes over what a hook on its layers would see: set it on the network, then fuse that."
            )
        if not _autocast(images):
            return super()._tokens(images, layout, whole, visible)
        # a fused copy has the precision that it was made in
        with torch.autocast(images.device.type, enabled=False):
            return super()._tokens(images.to(next(self.parameters()).dtype), layout, whole, visible)

    def _features(self, images: Tensor, blocks: Sequence[int] | None, visible: Visible) -> Features | list[Features]:
        if blocks is not None:
            raise PatchloomError(
                "A fused copy computes several blocks at once and keeps none of their outputs: call "
                "features(blocks=...) of the network that it was made from."
            )
        return super()._features(images, blocks, visible)

    def _check_dtype(self, images: Tensor) -> None:
        """Packed weights take their own type only; under autocast images are converted to it."""
        super()._check_dtype(images)
        own = next(self.parameters()).dtype
        if images.dtype != own and not _autocast(images):
            raise PatchloomError(f"{self.config.name} takes normalised images of {own}, not {images.dtype}.")


def _autocast(images: Tensor) -> bool:
    device = images.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
