"""Attention in its three forms: self-attention, talking-heads attention, class-attention.

Shapes: B images, N tokens, D channels, H heads, d = D / H; q is (B, H, Q, d), k and v are (B, H, K, d).
Every layer computes softmax(q k^T / sqrt(d)) v; `attend_plain` is written to be read beside the equation and gives
the attention map as well, `attend` is the fast form of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.kernels.native import takes_kernels
from patchloom.layers.inplace import drop, eager_inference, replaceable


class Attention(nn.Module):
    """What the three forms share: heads, the product itself, and recording of the map."""

    role = "attention"
    fast = True  # False asks for the plain form
    recorders: tuple[Callable[[Tensor], None], ...] = ()  # set by capture_attention; they ask for the plain form

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.proj = nn.Linear(dim, dim)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, H, N, d), a view."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def join_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) -> (B, N, D)."""
        return x.transpose(1, 2).flatten(2)

    def attend_plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """softmax(q k^T / sqrt(d)) v, and the map after softmax (B, H, Q, K)."""
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
        return weights @ v, weights

    def attend_fast(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The fast form, or the plain one when the map is being recorded or that form is asked for."""
        if self.fast and not self.recorders:
            return self.attend_fast(q, k, v)
        out, weights = self.attend_plain(q, k, v)
        for record in self.recorders:
            record(weights)
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class SelfAttention(Attention):
    """Multi-head self-attention, q, k and v from one Linear; in training with dropout after the projection.

    With `queries=k` only the first k tokens are given out, and only they ask; a recorded map is still that of all.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads)
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        if queries is not None and self.fast and not self.recorders and replaceable(self.qkv, nn.Linear):
            q, k, v = self._project_few(x, queries)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.join_heads(self.attend(q, k, v))
        return drop(self.proj(attended if queries is None else attended[:, :queries]), self.dropout, self.training)

    def _project_few(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        dim = x.shape[-1]
        (w_q, w_kv), (b_q, b_kv) = self.qkv.weight.split((dim, 2 * dim)), self.qkv.bias.split((dim, 2 * dim))
        q = F.linear(x[:, :queries], w_q, b_q)
        k, v = F.linear(x, w_kv, b_kv).chunk(2, dim=-1)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)


class TalkingHeadsAttention(SelfAttention):
    """Self-attention whose heads are mixed before and after softmax by two H x H Linear layers (CaiT).

    The recorded map is the one after the first mixing and softmax, before the second mixing.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout)
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)

    def attend_plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q * self.scale @ k.transpose(-2, -1)
        scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = scores.softmax(dim=-1)
        mixed = self.proj_w(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return mixed @ v, weights

    def attend_fast(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads are mixed as W (H, H) @ S (H, Q K) on the layout that the scores have, without a permute.

        The first bias shifts every score of a query alike, which softmax cancels: it is left out. The second one
        adds bias * sum(v), which needs no pass over the scores.
        """
        if not (replaceable(self.proj_l, nn.Linear) and replaceable(self.proj_w, nn.Linear)):
            return self.attend_plain(q, k, v)[0]
        before: Tensor = self.proj_l.weight * self.scale
        shift: Tensor = self.proj_w.bias
        if not eager_inference():  # no effect, but a gradient of zero: distributed training waits for one
            shift = shift + 0 * self.proj_l.bias
        if takes_kernels(q) and (not q.requires_grad or enough_images(len(q))):
            mixed = torch.ops.patchloom.talking_heads(q, k, v, before, self.proj_w.weight, shift)
            return mixed.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mix = talking_heads_by_image if q.is_cpu and eager_inference() else talking_heads
        return mix(q, k, v, before, self.proj_w.weight, shift[:, None, None] * v.sum(dim=-2, keepdim=True))


def enough_images(images: int) -> bool:
    """Whether talking heads' kernel pays in training: its way back has a thread an image, and loses where half of the
    threads would wait (benchmarks/choices.py)."""
    return 2 * images > torch.get_num_threads()


def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """mix(after, softmax(mix(before, q k^T))) v + shift for a whole batch, differentiable."""
    scores = q @ k.transpose(-2, -1)
    weights = (before @ scores.flatten(2)).view_as(scores).softmax(dim=-1)
    return (after @ weights.flatten(2)).view_as(scores) @ v + shift


def talking_heads_by_image(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """The same image by image, in two buffers that stay in the cache; for inference, since it writes in place."""
    before, after, shift = before.to(q.dtype), after.to(q.dtype), shift.to(q.dtype)
    images, heads, queries, width = q.shape
    first = q.new_empty(heads, queries, k.shape[-2])
    second = torch.empty_like(first)
    flat, mixed = first.view(heads, -1), second.view(heads, -1)
    out = q.new_empty(images, queries, heads, width).transpose(1, 2)
    for i in range(images):
        torch.bmm(q[i], k[i].transpose(-2, -1), out=first)
        torch.mm(before, flat, out=mixed)
        torch.softmax(second, dim=-1, out=first)
        torch.mm(after, flat, out=mixed)
        out[i] = torch.baddbmm(shift[i], second, v[i])
    return out


def attend_without_keys(q: Tensor, y: Tensor, keys: Tensor, values: Tensor, shift: Tensor) -> Tensor:
    """Attention of few tokens to all: q (Wk y) = (Wk' q) y, and Wv comes after the mean of y.

    q (B, Q, H, d), scaled; y (B, N, D); keys and values, the weights of the two projections, (H, d, D); shift (H, d),
    the bias of the values -> (B, Q, D). That of the keys shifts every score of a query alike, which softmax cancels.
    """
    asking = torch.einsum("bqhd,hde->bhqe", q, keys).flatten(1, 2)
    means = torch.bmm(torch.bmm(asking, y.transpose(1, 2)).softmax(dim=-1), y).unflatten(1, (q.shape[2], -1))
    return (torch.einsum("bhqe,hde->bqhd", means, values) + shift).flatten(2)


def few_queries(dim: int, heads: int) -> int:
    """Up to how many queries that pays; with more, projecting all tokens is faster (benchmarks/choices.py)."""
    return dim // (4 * heads)


class ClassAttention(Attention):
    """The first `queries` tokens are the queries, all tokens are keys and values; the patches are not updated (CaiT:
    ICCV section 3, thesis 3.6).

    In training with few queries no keys and values are computed, unless the plain form is asked for.

    `in_keys=False` leaves the query tokens out of keys and values (CaiT's ablation; PatchConvNet with one query per
    class). `role` is "attention" in CaiT and "pool" where the layer replaces a convnet's pooling.
    """

    def __init__(self, dim: int, heads: int, in_keys: bool = True, role: str = "attention") -> None:
        super().__init__(dim, heads)
        self.in_keys = in_keys
        self.role = role
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x: Tensor, queries: int) -> Tensor:
        q, source = self.q(x[:, :queries]), x if self.in_keys else x[:, queries:]
        alone = not self.recorders and replaceable(self.k, nn.Linear) and replaceable(self.v, nn.Linear)
        if self.training and self.fast and alone and queries <= few_queries(x.shape[-1], self.heads):
            return self.proj(self._attend_few(q, source))
        k, v = self.split_heads(self.k(source)), self.split_heads(self.v(source))
        return self.proj(self.join_heads(self.attend(self.split_heads(q), k, v)))

    def _attend_few(self, q: Tensor, source: Tensor) -> Tensor:
        keys, values, shift = (
            part.unflatten(0, (self.heads, -1))
            # no effect, but a gradient of zero for the bias of the keys: distributed training waits for one
            for part in (self.k.weight, self.v.weight, self.v.bias + 0 * self.k.bias)
        )
        return attend_without_keys(q.unflatten(-1, (self.heads, -1)) * self.scale, source, keys, values, shift)


@contextmanager
def capture_attention(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the attention maps of every forward inside the block.

    Yields a mapping from layer name to the map of the last forward, (B, heads, queries, keys), after softmax. Keys
    are in token order. The logits are those of the fast path to rounding.

        with capture_attention(model) as maps:
            logits = model(images)
    """
    if any(getattr(module, "fused", False) for module in model.modules()):
        raise PatchloomError("A fused copy has no attention maps: capture those of the network it was made from.")
    maps: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    recorders = {name: partial(maps.__setitem__, name) for name in layers}
    for name, layer in layers.items():
        layer.recorders = (*layer.recorders, recorders[name])
    try:
        yield maps
    finally:
        for name, layer in layers.items():
            layer.recorders = tuple(record for record in layer.recorders if record is not recorders[name])


def recording(module: nn.Module) -> bool:
    """Whether the maps of any attention in `module` are being captured."""
    return any(layer.recorders for layer in module.modules() if isinstance(layer, Attention))
