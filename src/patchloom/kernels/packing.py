"""Weights as the kernels read them: panels of outputs, in floats or in int8, and blocks of them in one row of bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.kernels import calls

LANES = 16  # floats of the widest vector
MIX = 4  # heads that are mixed at a time (attention.h)
GROUP = 8  # inputs that an int8 kernel reads at a time (bytes.h)


def panel() -> int:
    """Outputs that the kernels compute at a time: what fits the registers of this processor's widest vectors."""
    return int(calls.library().patchloom_panel())


def pack(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A Linear's weights (outputs, inputs) as panels (outputs / panel, inputs, panel), and its bias as (.., panel).

    A kernel then reads the weights of all inputs of a panel from consecutive memory.

    Args:
        weight: (outputs, inputs), float32 on the CPU.
        bias: (outputs,).
    """
    return in_panels(weight).transpose(1, 2).contiguous(), in_panels(bias)


def pack_int8(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A Linear in int8: weights (outputs / panel, inputs / 4, panel, 4), and the terms that make floats of its sums.

    The terms are, for each panel, the scale of an output, scale * (sum of its weights), and its bias.
    """
    outputs, inputs = weight.shape
    if bias.shape != (outputs,):
        raise ValueError(f"a bias {tuple(bias.shape)} is not that of {outputs} outputs")
    panels = -(-outputs // panel())
    # Uninitialised: the kernel writes every byte, padding included.
    levels = torch.empty((panels, -(-inputs // GROUP) * GROUP // 4, panel(), 4), dtype=torch.int8)
    # Scale and sum are filled in by the kernel; only the bias is known here.
    terms = torch.stack([torch.zeros_like(in_panels(bias))] * 2 + [in_panels(bias)], dim=1)
    calls.call("pack_bytes", weight.contiguous(), inputs, outputs, levels.data_ptr(), terms)
    return levels, terms


def in_panels(x: Tensor) -> Tensor:
    """(outputs, ...) -> (outputs / panel, panel, ...), zeros where none are left."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % panel())).unflatten(0, (-1, panel()))


def padded(vector: Tensor) -> Tensor:
    """A vector with zeros up to a whole panel."""
    return F.pad(vector, (0, -len(vector) % panel())).contiguous()


def joined(parts: Iterable[Tensor]) -> Tensor:
    """The bytes of a block's weights one after another, each tensor from a multiple of 64, a cache line, on.

    One tensor for a whole block: the kernel gets one address, and reads consecutive memory.
    """
    rows = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat([F.pad(row, (0, -len(row) % 64)) for row in rows])


def whole_mixing(before: Tensor, after: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mixing matrices of talking heads as the kernel takes them: (H, H), (H, H) and (H), rows in whole groups."""
    return whole_rows(before), after.contiguous(), whole_rows(shift)


def whole_rows(x: Tensor) -> Tensor:
    """x with zero rows up to a multiple of the heads that are mixed at a time."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % MIX)).contiguous()
