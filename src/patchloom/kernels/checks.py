"""Checks of shapes, strides and types before a kernel is called: the kernels themselves check nothing.

All raise ValueError: a user meets these only by calling torch.ops.patchloom directly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from patchloom.kernels.calls import address
from patchloom.kernels.packing import GROUP, panel


def check_linear(weight: Tensor, bias: Tensor, inputs: int, outputs: int) -> bool:
    """Whether the packed weights of a Linear (see `pack`, `pack_int8`) are int8. Refuses those of another shape.

    Raises:
        ValueError: weights or bias of another shape, type, device or layout, such as those packed on another processor.
    """
    width, int8 = panel(), weight.dtype == torch.int8
    # Outputs in whole panels, rounded up; int8 also reads inputs in whole groups.
    panels = -(-outputs // width)
    shape = (panels, -(-inputs // GROUP) * GROUP // 4, width, 4) if int8 else (panels, inputs, width)
    fitting = weight.shape == shape and bias.shape == ((panels, 3, width) if int8 else (panels, width))
    if not int8:
        address(weight)
    if not fitting or not weight.is_cpu or not weight.is_contiguous() or not bias.is_contiguous():
        found = f"panels {tuple(weight.shape)} and bias {tuple(bias.shape)}"
        raise ValueError(f"{found} are not those of a Linear of {inputs} inputs, {outputs} outputs on this processor")
    return int8


def check_same_type(int8: Iterable[bool]) -> bool:
    """Whether all layers of a branch are int8. Refuses a mixture."""
    kinds = set(int8)
    if len(kinds) > 1:
        raise ValueError("the layers of a branch are all float or all int8")
    return kinds.pop()


def check_total(total: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse what cannot be added to in place: another shape, or memory that is not contiguous."""
    if not total.is_contiguous():
        raise ValueError(f"what is added to in place is contiguous, not of strides {total.stride()}")
    if total.shape != shape:
        raise ValueError(f"what is added to has the shape {tuple(shape)}, not {tuple(total.shape)}")


def check_dense(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse another shape, or memory that is not contiguous."""
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} {tuple(x.shape)}, strides {x.stride()}, do not fit: {shape} is wanted, contiguous")


def check_heads(dim: int, heads: int, mixing: list[Tensor]) -> None:
    """Refuse heads that do not divide the channels, and mixing matrices of other numbers of heads."""
    shapes = [tuple(part.shape) for part in mixing]
    if heads < 1 or dim % heads or (mixing and shapes != [(heads, heads), (heads, heads), (heads,)]):
        raise ValueError(f"{heads} heads mixed by {shapes} do not fit {dim} channels")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q (B, H, Q, d), k and v (B, H, K, d) whose B, H, K or d differ."""
    if k.shape != v.shape or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        raise ValueError(f"q, k and v of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} do not fit each other")


def check_blocks(weights: Tensor, parts: Iterable[tuple[int, ...]], int8: bool) -> None:
    """Refuse weights (blocks, bytes) that are not `joined` from blocks of these parts.

    A part is a number of floats, or the inputs and outputs of a Linear.
    """
    size = 0
    for part in parts:
        # a Linear has whole panels: weights, then biases; in int8 a quarter of that, then three terms per output
        wide = -(-part[-1] // panel()) * panel()
        floats = (
            part
            if len(part) == 1
            else (wide * (-(-part[0] // GROUP) * GROUP // 4), 3 * wide)
            if int8
            else (wide * part[0], wide)
        )
        # each tensor starts at a multiple of 64 bytes, a cache line
        size += sum(-(-4 * count // 64) * 64 for count in floats)
    if (
        weights.shape[1:] != (size,)
        or weights.dtype != torch.uint8
        or not weights.is_contiguous()
        or not weights.is_cpu
    ):
        raise ValueError(f"weights {tuple(weights.shape)} are not those of blocks of {size} bytes on this processor")
