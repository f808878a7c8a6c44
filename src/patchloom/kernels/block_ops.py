"""Operators of many layers in one call: stems, and columns of blocks."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from patchloom.kernels.calls import call
from patchloom.kernels.checks import check_blocks, check_heads, check_total
from patchloom.kernels.operators import operator, returns_nothing
from patchloom.kernels.packing import LANES, MIX


@operator(
    "conv_blocks_(Tensor(a!) x, Tensor weights, int squeezed, float eps, bool paired, bool int8) -> ()", returns_nothing
)
def conv_blocks_(x: Tensor, weights: Tensor, squeezed: int, eps: float, paired: bool, int8: bool) -> None:
    """PatchConvNet's blocks, in place: x (B, height, width, D), normalised before each block when eps >= 0.

    The weights (blocks, bytes) of each are joined from those of expand (packed), depth-wise (9, D), squeeze (D, S),
    excite (S, D) and project (packed), each followed by its bias; D and S are multiples of 16. `paired` asks for
    one Strassen step in float layers whose inputs are a multiple of two vectors: seven products of half the size in
    place of eight, and about twice the rounding, that of the larger of two tokens.
    """
    _, height, width, dim = x.shape
    check_total(x, x.shape)
    if dim % LANES or squeezed % LANES:
        raise ValueError(f"{dim} channels squeezed to {squeezed} are not multiples of {LANES}")
    parts = [(dim, dim), (9 * dim,), (dim,), (dim * squeezed,), (squeezed,), (squeezed * dim,), (dim,), (dim, dim)]
    check_blocks(weights, parts, int8)
    # scratch memory: for every thread a map, and the mean and the gate of squeeze-excite
    work = x.new_empty(torch.get_num_threads() * (height * width + 2) * dim)
    call("conv_blocks", x, work, (*x.shape, squeezed, len(weights), int(paired)), weights.data_ptr(), eps, int8)


def _convolved(x: Tensor, stages: list[int]) -> list[tuple[int, int, int]]:
    """Height, width and channels of the map that each convolution makes."""
    maps, (height, width) = [], x.shape[1:3]
    for outputs, side, step, padding in zip(*(stages[i::4] for i in range(4)), strict=True):
        if min(height, width) + 2 * padding < side:
            raise ValueError(f"a map of {height} x {width} has no window of {side} x {side}")
        # The size of a convolution's output, as in torch.
        height, width = ((length + 2 * padding - side) // step + 1 for length in (height, width))
        maps.append((height, width, outputs))
    return maps


@operator(
    "stem(Tensor x, Tensor weights, int[] stages, bool int8) -> Tensor",
    lambda x, _, stages, __: x.new_empty((len(x), *_convolved(x, stages)[-1])),
)
def stem(x: Tensor, weights: Tensor, stages: list[int], int8: bool) -> Tensor:
    """Images (B, height, width, C) -> (B, down, across, outputs): convolutions with a GELU between them.

    `stages` has outputs, side, step and padding of each; the weights (bytes) are joined from those of a Linear of a
    window's pixels in the order of rows, columns and channels, packed, each followed by its bias.
    """
    x = x.contiguous()
    images, _, _, channels = x.shape
    maps = _convolved(x, stages)
    # Each convolution reads the outputs of the one before it; `stages` has four numbers for each.
    inputs = [channels, *stages[:-4:4]]
    parts = [(side * side * of, outputs) for of, outputs, side in zip(inputs, stages[::4], stages[1::4], strict=True)]
    check_blocks(weights[None], parts, int8)
    out = x.new_empty((images, *maps[-1]))
    # scratch memory: every thread has all maps of one image
    work = x.new_empty(torch.get_num_threads() * sum(prod(size) for size in maps))
    call("stem", x, out, work, (*x.shape, len(parts), *stages), weights.data_ptr(), int8)
    return out


@operator(
    "attention_blocks_(Tensor(a!) x, Tensor weights, int heads, int inner, int hidden, bool mixed, float scale, "
    "float eps, float eps_ffn, bool paired, bool int8) -> ()",
    returns_nothing,
)
def attention_blocks_(
    x: Tensor,
    weights: Tensor,
    heads: int,
    inner: int,
    hidden: int,
    mixed: bool,
    scale: float,
    eps: float,
    eps_ffn: float,
    paired: bool,
    int8: bool,
) -> None:
    """Blocks of attention and FFN, in place: x (B, N, D), as `attention_` and `ffn_` compute them.

    `inner` is the number of channels of all heads together: P D where the heads of P parallel branches are side by
    side, D otherwise.

    The weights (blocks, bytes) of each are joined from those of qkv and proj, of `whole_mixing` if heads are mixed, of
    fc1 and fc2, layers packed and followed by their bias. `paired` as in `conv_blocks_`.
    """
    images, tokens, dim = x.shape
    check_total(x, x.shape)
    check_heads(inner, heads, [])
    # Rounded up to whole groups of MIX heads.
    whole = heads + -heads % MIX
    mixing = [(whole * heads,), (heads * heads,), (whole,)] if mixed else []
    check_blocks(weights, [(dim, 3 * inner), (inner, dim), *mixing, (dim, hidden), (hidden, dim)], int8)
    shape = (images, tokens, dim, heads, inner, hidden, len(weights), int(mixed), int(paired))
    call("attention_blocks", x, shape, weights.data_ptr(), scale, eps, eps_ffn, int8)
