"""The C++ kernels as torch operators, `torch.ops.patchloom.*`, for float32 on a CPU that has AVX2 or AVX-512.

Weights are of floats (`pack`) or of bytes (`pack_bytes`); what goes in and comes out is float32 with both.

Shapes: B images, N tokens, D channels, H heads of d = D / H channels. Weights of a Linear come as panels (`pack`). An
operator whose name ends in `_` adds to its first argument in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.kernels import libraries

_operators = torch.library.Library("patchloom", "DEF")


@cache
def why_not() -> str | None:
    """Why the C++ kernels cannot be used here, as a sentence; None when they can."""
    return libraries.why_not(f"networks-{libraries.instruction_set()}")


def available() -> bool:
    return why_not() is None


def takes_kernels(x: Tensor) -> bool:
    """Whether a tensor can go through the C++ kernels: float32 on a CPU, with nothing that looks on or transforms."""
    watched = (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
    return x.is_cpu and x.dtype == torch.float32 and not watched and available()


@cache
def _library() -> ctypes.CDLL:
    return libraries.open_library(f"networks-{libraries.instruction_set()}", _SIGNATURES)


LANES, MIX, GROUP = 16, 4, 8  # floats of the widest vector; MIX and GROUP of attention.h and bytes.h
_SIGNATURES = {  # of networks.cpp, a letter an argument
    "linear": "ppnppnnfiiii",
    "stem": "pppppii",
    "ffn": "ppnnnppppfii",
    "attention": "pppppppppfii",
    "attention_branch": "ppppppppppffii",
    "pack_bytes": "pnnppi",
    "talking_heads_back": "ppppppppppppi",
    "cross_patch": "pppppi",
    "conv_blocks": "ppppfii",
    "attention_blocks": "pppfffii",
    "gated_linear": "pppnnppnnii",
}


def _call(name: str, *arguments: Any) -> None:
    """Call a kernel with tensors, sizes (a tuple becomes an array) and numbers, on as many threads as torch has."""
    kept = [(ctypes.c_int64 * len(a))(*a) if isinstance(a, tuple) else a for a in arguments]
    raw = [_address(a) if isinstance(a, Tensor) else a for a in kept]
    getattr(_library(), f"patchloom_{name}")(*raw, torch.get_num_threads())


def _address(x: Tensor) -> int:
    if x.dtype != torch.float32 or not x.is_cpu:
        raise ValueError(f"the C++ kernels take float32 on a CPU, not {x.dtype} on {x.device}")
    return x.data_ptr()


def _check_linear(weight: Tensor, bias: Tensor, inputs: int, outputs: int) -> bool:
    """Whether the weights of a Linear are bytes, and an error if they are those of another."""
    width, of_bytes = panel(), weight.dtype == torch.int8
    panels = -(-outputs // width)
    shape = (panels, -(-inputs // GROUP) * GROUP // 4, width, 4) if of_bytes else (panels, inputs, width)
    fitting = weight.shape == shape and bias.shape == ((panels, 3, width) if of_bytes else (panels, width))
    if not of_bytes:
        _address(weight)
    if not fitting or not weight.is_cpu or not weight.is_contiguous() or not bias.is_contiguous():
        found = f"panels {tuple(weight.shape)} and bias {tuple(bias.shape)}"
        raise ValueError(f"{found} are not those of a Linear of {inputs} inputs, {outputs} outputs on this processor")
    return of_bytes


def _alike(of_bytes: Iterable[bool]) -> bool:
    kinds = set(of_bytes)
    if len(kinds) > 1:
        raise ValueError("the layers of a branch are all of floats or all of bytes")
    return kinds.pop()


def _check_total(total: Tensor, shape: tuple[int, ...]) -> None:
    if not total.is_contiguous():
        raise ValueError(f"what is added to in place is contiguous, not of strides {total.stride()}")
    if total.shape != shape:
        raise ValueError(f"what is added to has the shape {tuple(shape)}, not {tuple(total.shape)}")


def _check_dense(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} {tuple(x.shape)}, strides {x.stride()}, do not fit: {shape} is wanted, contiguous")


def _check_heads(dim: int, heads: int, mixing: list[Tensor]) -> None:
    shapes = [tuple(part.shape) for part in mixing]
    if heads < 1 or dim % heads or (mixing and shapes != [(heads, heads), (heads, heads), (heads,)]):
        raise ValueError(f"{heads} heads mixed by {shapes} do not fit {dim} channels")


def _check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape != v.shape or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        raise ValueError(f"q, k and v of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} do not fit each other")


def panel() -> int:
    """Columns that the kernels compute at a time."""
    return int(_library().patchloom_panel())


def pack(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A Linear's weights (outputs, inputs) as panels (outputs / panel, inputs, panel), and its bias as (.., panel)."""
    return _panels(weight).transpose(1, 2).contiguous(), _panels(bias)


def pack_bytes(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A Linear in 8 bits: weights (outputs / panel, inputs / 4, panel, 4), and what makes its sums floats again.

    The latter are, for each panel, the scale of an output, scale * (sum of its weights), and its bias.
    """
    outputs, inputs = weight.shape
    if bias.shape != (outputs,):
        raise ValueError(f"a bias {tuple(bias.shape)} is not that of {outputs} outputs")
    panels = -(-outputs // panel())
    levels = torch.empty((panels, -(-inputs // GROUP) * GROUP // 4, panel(), 4), dtype=torch.int8)
    terms = torch.stack([torch.zeros_like(_panels(bias))] * 2 + [_panels(bias)], dim=1)
    _call("pack_bytes", weight.contiguous(), inputs, outputs, levels.data_ptr(), terms)
    return levels, terms


def _panels(x: Tensor) -> Tensor:
    """(outputs, ...) -> (outputs / panel, panel, ...), zeros where none are left."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % panel())).unflatten(0, (-1, panel()))


def padded(vector: Tensor) -> Tensor:
    """A vector with zeros up to a whole panel."""
    return F.pad(vector, (0, -len(vector) % panel())).contiguous()


def _operator(schema: str, meta: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as torch.ops.patchloom.NAME, with `meta` for shapes alone."""
    name = schema.split("(")[0]
    _operators.define(schema)
    _operators.impl(name, meta, "Meta")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operators.impl(name, function, "CPU")
        return function

    return register


def _nothing(*_: Any) -> None:
    return None


@_operator(
    "linear(Tensor x, Tensor weight, Tensor bias, int outputs, float eps, bool activate) -> Tensor",
    lambda x, *others: x.new_empty((*x.shape[:-1], others[2])),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor, outputs: int, eps: float, activate: bool) -> Tensor:
    """(..., D) -> (..., outputs): a Linear, of x normalised when eps >= 0, through a GELU when told to."""
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    inputs = x.shape[-1]
    of_bytes = _check_linear(weight, bias, inputs, outputs)
    rows, panels = x.numel() // inputs, weight.data_ptr()
    _call("linear", x, out, rows, panels, bias, inputs, outputs, eps, activate, False, of_bytes)
    return out


@_operator("linear_(Tensor(a!) total, Tensor x, Tensor weight, Tensor bias, Tensor? gate) -> ()", _nothing)
def linear_(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None) -> None:
    """total (..., outputs) += a Linear of x (..., D), of gate * x when there is a gate (B, D)."""
    x = x.contiguous()
    inputs, outputs = x.shape[-1], total.shape[-1]
    rows = x.numel() // inputs
    _check_total(total, (*x.shape[:-1], outputs))
    of_bytes = _check_linear(weight, bias, inputs, outputs)
    if gate is None:
        _call("linear", x, total, rows, weight.data_ptr(), bias, inputs, outputs, -1.0, False, True, of_bytes)
    else:
        gate, tokens, panels = gate.contiguous(), rows // max(len(x), 1), weight.data_ptr()
        _check_dense("gates", gate, (len(x), inputs))
        _call("gated_linear", x, gate, total, rows, tokens, panels, bias, inputs, outputs, of_bytes)


@_operator(
    "ffn_(Tensor(a!) total, Tensor? x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, int hidden, "
    "float eps) -> ()",
    _nothing,
)
def ffn_(
    total: Tensor,
    x: Tensor | None,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    hidden: int,
    eps: float,
) -> None:
    """total (..., D) += fc2(GELU(fc1(x))), x normalised first when eps >= 0; without x, of total itself."""
    x = total if x is None else x.contiguous()
    dim = x.shape[-1]
    _check_total(total, x.shape)
    of_bytes = _alike([_check_linear(weight1, bias1, dim, hidden), _check_linear(weight2, bias2, hidden, dim)])
    rows, panels1, panels2 = x.numel() // dim, weight1.data_ptr(), weight2.data_ptr()
    _call("ffn", x, total, rows, dim, hidden, panels1, bias1, panels2, bias2, eps, of_bytes)


@_operator("cross_patch_(Tensor(a!) x, Tensor weight, Tensor channels, Tensor patches) -> ()", _nothing)
def cross_patch_(x: Tensor, weight: Tensor, channels: Tensor, patches: Tensor) -> None:
    """x (B, N, D) += ResMLP's mixing: scale * (weight @ x) + rows * across + shift * gain.

    `channels` (3, D) has scale, across and gain, each padded to a panel; `patches` (2, N) has rows and shift.
    """
    _, tokens, dim = x.shape
    _check_total(x, x.shape)
    _check_dense("weights", weight, (tokens, tokens))
    _check_dense("channels", channels, (3, -(-dim // panel()) * panel()))
    _check_dense("patches", patches, (2, tokens))
    _call("cross_patch", x, tuple(x.shape), weight, channels, patches)


def joined(parts: Iterable[Tensor]) -> Tensor:
    """The bytes of a block's weights one after another, each tensor from a multiple of 64 on."""
    rows = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat([F.pad(row, (0, -len(row) % 64)) for row in rows])


def _check_blocks(weights: Tensor, parts: Iterable[tuple[int, ...]], int8: bool) -> None:
    """An error if weights (blocks, bytes) are not those of blocks of these parts.

    A part is a number of floats, or the inputs and outputs of a Linear.
    """
    size = 0
    for part in parts:
        wide = -(-part[-1] // panel()) * panel()
        floats = (
            part
            if len(part) == 1
            else (wide * (-(-part[0] // GROUP) * GROUP // 4), 3 * wide)
            if int8
            else (wide * part[0], wide)
        )
        size += sum(-(-4 * count // 64) * 64 for count in floats)
    if (
        weights.shape[1:] != (size,)
        or weights.dtype != torch.uint8
        or not weights.is_contiguous()
        or not weights.is_cpu
    ):
        raise ValueError(f"weights {tuple(weights.shape)} are not those of blocks of {size} bytes on this processor")


@_operator(
    "conv_blocks_(Tensor(a!) x, Tensor weights, int squeezed, float eps, bool paired, bool int8) -> ()", _nothing
)
def conv_blocks_(x: Tensor, weights: Tensor, squeezed: int, eps: float, paired: bool, int8: bool) -> None:
    """x (B, height, width, D) goes through PatchConvNet's blocks, normalised before each when eps >= 0.

    The weights (blocks, bytes) of each are joined from those of expand (packed), depth-wise (9, D), squeeze (D, S),
    excite (S, D) and project (packed), each followed by its bias; D and S are multiples of 16. `paired` is for one step
    of Strassen's product in those of floats, of layers whose inputs are a multiple of two vectors: an eighth less of
    them, about twice the rounding, that of the larger of two tokens.
    """
    _, height, width, dim = x.shape
    _check_total(x, x.shape)
    if dim % LANES or squeezed % LANES:
        raise ValueError(f"{dim} channels squeezed to {squeezed} are not multiples of {LANES}")
    parts = [(dim, dim), (9 * dim,), (dim,), (dim * squeezed,), (squeezed,), (squeezed * dim,), (dim,), (dim, dim)]
    _check_blocks(weights, parts, int8)
    work = x.new_empty(torch.get_num_threads() * (height * width + 2) * dim)
    _call("conv_blocks", x, work, (*x.shape, squeezed, len(weights), int(paired)), weights.data_ptr(), eps, int8)


def _convolved(x: Tensor, stages: list[int]) -> list[tuple[int, int, int]]:
    """Height, width and channels of the map that each convolution makes."""
    maps, (height, width) = [], x.shape[1:3]
    for outputs, side, step, padding in zip(*(stages[i::4] for i in range(4)), strict=True):
        if min(height, width) + 2 * padding < side:
            raise ValueError(f"a map of {height} x {width} has no window of {side} x {side}")
        height, width = ((length + 2 * padding - side) // step + 1 for length in (height, width))
        maps.append((height, width, outputs))
    return maps


@_operator(
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
    inputs = [channels, *stages[:-4:4]]
    parts = [(side * side * of, outputs) for of, outputs, side in zip(inputs, stages[::4], stages[1::4], strict=True)]
    _check_blocks(weights[None], parts, int8)
    out = x.new_empty((images, *maps[-1]))
    work = x.new_empty(torch.get_num_threads() * sum(prod(size) for size in maps))
    _call("stem", x, out, work, (*x.shape, len(parts), *stages), weights.data_ptr(), int8)
    return out


@_operator(
    "attention_blocks_(Tensor(a!) x, Tensor weights, int heads, int inner, int hidden, bool mixed, float scale, "
    "float eps, float eps_ffn, bool paired, bool int8) -> ()",
    _nothing,
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
    """x (B, N, D) goes through blocks of attention and FFN, as `attention_` and `ffn_` compute them.

    `inner` is the number of channels of all heads together: P D where the heads of P parallel branches are side by
    side, D otherwise.

    The weights (blocks, bytes) of each are joined from those of qkv and proj, of `whole_mixing` if heads are mixed, of
    fc1 and fc2, layers packed and followed by their bias. `paired` as in `conv_blocks_`.
    """
    images, tokens, dim = x.shape
    _check_total(x, x.shape)
    _check_heads(inner, heads, [])
    whole = heads + -heads % MIX
    mixing = [(whole * heads,), (heads * heads,), (whole,)] if mixed else []
    _check_blocks(weights, [(dim, 3 * inner), (inner, dim), *mixing, (dim, hidden), (hidden, dim)], int8)
    shape = (images, tokens, dim, heads, inner, hidden, len(weights), int(mixed), int(paired))
    _call("attention_blocks", x, shape, weights.data_ptr(), scale, eps, eps_ffn, int8)


@_operator("attention(Tensor q, Tensor k, Tensor v, float scale, bool int8) -> Tensor", lambda q, *_: _heads_joined(q))
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, int8: bool) -> Tensor:
    """softmax(scale q k^T) v, heads joined: q (B, H, Q, d), k and v (B, H, K, d) -> (B, Q, D)."""
    return _attend(q, k, v, None, None, None, scale, int8)


@_operator(
    "attention_(Tensor(a!) total, Tensor? x, Tensor qkv, Tensor qkv_bias, Tensor proj, Tensor proj_bias, int heads, "
    "int inner, float scale, float eps, Tensor[] mixing) -> ()",
    _nothing,
)
def attention_(
    total: Tensor,
    x: Tensor | None,
    qkv: Tensor,
    qkv_bias: Tensor,
    proj: Tensor,
    proj_bias: Tensor,
    heads: int,
    inner: int,
    scale: float,
    eps: float,
    mixing: list[Tensor],
) -> None:
    """total (B, N, D) += proj(attention(qkv(x))), x normalised first when eps >= 0; without x, of total itself.

    `inner` is the number of channels of all heads together. `mixing` is empty, or what `talking_heads` calls before,
    after and shift.
    """
    x = total if x is None else x.contiguous()
    images, tokens, dim = x.shape
    _check_total(total, x.shape)
    _check_heads(inner, heads, mixing)
    of_bytes = _alike([_check_linear(qkv, qkv_bias, dim, 3 * inner), _check_linear(proj, proj_bias, inner, dim)])
    mixes = whole_mixing(*mixing) if mixing else (None,) * 3
    shape, weights = (images, tokens, dim, heads, inner), (qkv.data_ptr(), qkv_bias, proj.data_ptr(), proj_bias)
    _call("attention_branch", x, total, shape, *weights, *mixes, scale, eps, of_bytes)


@_operator(
    "talking_heads(Tensor q, Tensor k, Tensor v, Tensor before, Tensor after, Tensor shift) -> Tensor",
    lambda q, *_: _heads_joined(q),
)
def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """(mix(after, softmax(mix(before, q k^T))) + shift) v, heads joined; `before` and `after` (H, H), `shift` (H)."""
    _check_heads(q.shape[1] * q.shape[3], q.shape[1], [before, after, shift])
    return _attend(q, k, v, *whole_mixing(before, after, shift), 1.0)


@_operator(
    "talking_heads_back(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor before, Tensor after, Tensor shift)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda _, *inputs: (*map(_heads_apart, inputs[:3]), *(torch.empty_like(x) for x in inputs[3:])),
)
def talking_heads_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of all inputs of `talking_heads`, from that of its output; scores are computed anew."""
    _check_alike(q, k, v)
    q, k, v = (_dense(x) for x in (q, k, v))
    images, heads, queries, width = q.shape
    _check_heads(heads * width, heads, [before, after, shift])
    _check_dense("gradients", grad := grad.contiguous(), (images, queries, heads * width))
    grad = grad.unflatten(-1, (heads, width)).transpose(1, 2)
    dq, dk, dv = (_heads_apart(x) for x in (q, k, v))
    sums = q.new_zeros(images, 2 * heads * heads + heads)
    strides = tuple(s for x in (q, k, v, grad, dq, dk, dv) for s in x.stride()[:3])
    mixes = torch.cat([_whole_rows(x) for x in (before, after, before.t(), after.t())])
    shape = (images, heads, queries, k.shape[2], width)
    _call("talking_heads_back", q, k, v, grad, dq, dk, dv, sums, shape, strides, mixes, _whole_rows(shift))
    of_before, of_after, of_shift = sums.sum(dim=0).split((heads * heads, heads * heads, heads))
    return dq, dk, dv, of_before.reshape(heads, heads).clone(), of_after.reshape(heads, heads).clone(), of_shift.clone()


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 (torch names them)
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # gradients of these gradients will be asked for: torch's own operators have them
        wanted = [x for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True) if needed]
        found = iter(torch.autograd.grad(_plain_talking_heads(*ctx.saved_tensors), wanted, grad, create_graph=True))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
    return torch.ops.patchloom.talking_heads_back(grad, *ctx.saved_tensors)


def _plain_talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    mixed = torch.einsum("gh,bhqk->bgqk", before, q @ k.transpose(-2, -1)).softmax(dim=-1)
    return ((torch.einsum("gh,bhqk->bgqk", after, mixed) + shift[:, None, None]) @ v).transpose(1, 2).flatten(2)


torch.library.register_autograd("patchloom::talking_heads", _back, setup_context=_keep)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    shift: Tensor | None,
    scale: float,
    int8: bool = False,
) -> Tensor:
    _check_alike(q, k, v)
    q, k, v = (_dense(x) for x in (q, k, v))
    images, heads, queries, width = q.shape
    out = q.new_empty((images, queries, heads, width))
    strides = tuple(s for x in (q, k, v, out.transpose(1, 2)) for s in x.stride()[:3])
    shape = (images, heads, queries, k.shape[2], width)
    _call("attention", q, k, v, out, shape, strides, before, after, shift, scale, int8)
    return out.flatten(2)


def _heads_joined(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1] * q.shape[3]))


def _heads_apart(x: Tensor) -> Tensor:
    """Room for what is as large as x (B, H, N, d), laid out as (B, N, H, d)."""
    images, heads, tokens, width = x.shape
    return x.new_empty((images, tokens, heads, width)).transpose(1, 2)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def whole_mixing(before: Tensor, after: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What mixes heads as the kernel takes it."""
    return _whole_rows(before), after.contiguous(), _whole_rows(shift)


def _whole_rows(x: Tensor) -> Tensor:
    """With zeros up to a multiple of the heads that are mixed at a time."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % MIX)).contiguous()
