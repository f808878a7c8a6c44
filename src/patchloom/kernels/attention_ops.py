"""Operators of attention, plain and with talking heads; the latter with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchloom.kernels.calls import call
from patchloom.kernels.checks import check_dense, check_heads, check_linear, check_qkv, check_same_type, check_total
from patchloom.kernels.operators import operator, returns_nothing
from patchloom.kernels.packing import whole_mixing, whole_rows


@operator("attention(Tensor q, Tensor k, Tensor v, float scale, bool int8) -> Tensor", lambda q, *_: _heads_joined(q))
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, int8: bool) -> Tensor:
    """softmax(scale q k^T) v, heads joined: q (B, H, Q, d), k and v (B, H, K, d) -> (B, Q, D).

    Args:
        scale: of the scores, usually 1 / sqrt(d).
        int8: whether the products of q k^T and of the probabilities with v are computed in int8.
    """
    return _attend(q, k, v, None, None, None, scale, int8)


@operator(
    "attention_(Tensor(a!) total, Tensor? x, Tensor qkv, Tensor qkv_bias, Tensor proj, Tensor proj_bias, int heads, "
    "int inner, float scale, float eps, Tensor[] mixing) -> ()",
    returns_nothing,
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

    Args:
        qkv, proj: packed weights (`pack` or `pack_int8`), each with its bias.
        heads: H; each has inner / heads channels.
        scale: of the scores.
        eps: of the LayerNorm before qkv; negative: none, or x is normalised already.
    """
    x = total if x is None else x.contiguous()
    images, tokens, dim = x.shape
    check_total(total, x.shape)
    check_heads(inner, heads, mixing)
    # Every shape is checked here: the kernel trusts its arguments and would read beyond a tensor.
    int8 = check_same_type([check_linear(qkv, qkv_bias, dim, 3 * inner), check_linear(proj, proj_bias, inner, dim)])
    mixes = whole_mixing(*mixing) if mixing else (None,) * 3
    shape, weights = (images, tokens, dim, heads, inner), (qkv.data_ptr(), qkv_bias, proj.data_ptr(), proj_bias)
    call("attention_branch", x, total, shape, *weights, *mixes, scale, eps, int8)


@operator(
    "talking_heads(Tensor q, Tensor k, Tensor v, Tensor before, Tensor after, Tensor shift) -> Tensor",
    lambda q, *_: _heads_joined(q),
)
def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """(mix(after, softmax(mix(before, q k^T))) + shift) v, heads joined; `before` and `after` (H, H), `shift` (H)."""
    check_heads(q.shape[1] * q.shape[3], q.shape[1], [before, after, shift])
    return _attend(q, k, v, *whole_mixing(before, after, shift), 1.0)


@operator(
    "talking_heads_back(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor before, Tensor after, Tensor shift)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda _, *inputs: (*map(_heads_apart, inputs[:3]), *(torch.empty_like(x) for x in inputs[3:])),
)
def talking_heads_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of all inputs of `talking_heads`, from that of its output; scores are computed again.

    grad (B, Q, D), q (B, H, Q, d), k and v (B, H, K, d) -> those of q, k, v, before (H, H), after (H, H), shift (H).
    """
    check_qkv(q, k, v)
    q, k, v = (_dense(x) for x in (q, k, v))
    images, heads, queries, width = q.shape
    check_heads(heads * width, heads, [before, after, shift])
    check_dense("gradients", grad := grad.contiguous(), (images, queries, heads * width))
    grad = grad.unflatten(-1, (heads, width)).transpose(1, 2)
    dq, dk, dv = (_heads_apart(x) for x in (q, k, v))
    # one row per image: threads work on images, and share no sums
    sums = q.new_zeros(images, 2 * heads * heads + heads)
    strides = tuple(s for x in (q, k, v, grad, dq, dk, dv) for s in x.stride()[:3])
    # the backward pass mixes gradients with the transposed matrices
    mixes = torch.cat([whole_rows(x) for x in (before, after, before.t(), after.t())])
    shape = (images, heads, queries, k.shape[2], width)
    call("talking_heads_back", q, k, v, grad, dq, dk, dv, sums, shape, strides, mixes, whole_rows(shift))
    # clones: an operator must not return views of one tensor
    of_before, of_after, of_shift = sums.sum(dim=0).split((heads * heads, heads * heads, heads))
    return dq, dk, dv, of_before.reshape(heads, heads).clone(), of_after.reshape(heads, heads).clone(), of_shift.clone()


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 (torch names them)
    """Only the inputs: the scores, H Q K numbers per image, are what memory is spent on elsewhere."""
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # for second derivatives, which torch's own operators have
        wanted = [x for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True) if needed]
        found = iter(torch.autograd.grad(_plain_talking_heads(*ctx.saved_tensors), wanted, grad, create_graph=True))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
    return torch.ops.patchloom.talking_heads_back(grad, *ctx.saved_tensors)


def _plain_talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """`talking_heads` in torch's operators, as the equation reads (CaiT 3.6; heads h before, g after a mixing)."""
    mixed = torch.einsum("gh,bhqk->bgqk", before, q @ k.transpose(-2, -1)).softmax(dim=-1)
    return ((torch.einsum("gh,bhqk->bgqk", after, mixed) + shift[:, None, None]) @ v).transpose(1, 2).flatten(2)


torch.library.register_autograd("patchloom::talking_heads", _backward, setup_context=_keep)


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
    """Attention (B, H, Q, d) -> (B, Q, D), with heads mixed where `before` and the others are given."""
    check_qkv(q, k, v)
    q, k, v = (_dense(x) for x in (q, k, v))
    images, heads, queries, width = q.shape
    # written with heads innermost, so that joining them is a view
    out = q.new_empty((images, queries, heads, width))
    # Batch, head and token strides; that of the channels is 1.
    strides = tuple(s for x in (q, k, v, out.transpose(1, 2)) for s in x.stride()[:3])
    shape = (images, heads, queries, k.shape[2], width)
    call("attention", q, k, v, out, shape, strides, before, after, shift, scale, int8)
    return out.flatten(2)


def _heads_joined(q: Tensor) -> Tensor:
    """The shape of the output, (B, H, Q, d) -> (B, Q, D)."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1] * q.shape[3]))


def _heads_apart(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x (B, H, N, d), laid out as (B, N, H, d)."""
    images, heads, tokens, width = x.shape
    return x.new_empty((images, tokens, heads, width)).transpose(1, 2)


def _dense(x: Tensor) -> Tensor:
    """x with channels in a row; the kernels take any other strides, such as those of q, k and v inside one qkv."""
    return x if x.stride(-1) == 1 else x.contiguous()
