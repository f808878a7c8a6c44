"""Attention in its three forms: self-attention, talking-heads attention, class-attention.

Shapes: B images, N tokens, D channels, H heads, d = D / H; q is (B, H, Q, d), k and v are (B, H, K, d).
Every layer computes softmax(q k^T / sqrt(d)) v. `attend_plain` follows the equation and also returns the attention
map; `attend_fast` computes the same function faster, and `attend` chooses between the two.
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
    """Base of the three forms: splits heads, computes attention and records the attention map."""

    role = "attention"
    fast = True  # False selects the plain form
    # set by capture_attention; while there are any, the plain form runs, since only it computes the map
    recorders: tuple[Callable[[Tensor], None], ...] = ()

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
        """softmax(q k^T / sqrt(d)) v, (B, H, Q, d), and the map after softmax, (B, H, Q, K)."""
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
        return weights @ v, weights

    def attend_fast(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of `attend_plain`, (B, H, Q, d), without the map."""
        return F.scaled_dot_product_attention(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) by the fast form, or by the plain form if it is selected or the map is being recorded."""
        if self.fast and not self.recorders:
            return self.attend_fast(q, k, v)
        out, weights = self.attend_plain(q, k, v)
        for record in self.recorders:
            record(weights)
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class SelfAttention(Attention):
    """Multi-head self-attention, (B, N, D) -> (B, N, D): q, k and v come from one Linear. In training, dropout follows
    the projection.

    With `queries=k` only the first k tokens are queries, and the output is (B, k, D). A recorded map still has all
    queries.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads)
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        if queries is not None and self.fast and not self.recorders and replaceable(self.qkv, nn.Linear):
            q, k, v = self._project_few(x, queries)
        else:
            # (B, N, 3 D) -> (3, B, H, N, d)
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.join_heads(self.attend(q, k, v))
        return drop(self.proj(attended if queries is None else attended[:, :queries]), self.dropout, self.training)

    def _project_few(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """q of the first `queries` tokens, k and v of all: the rows of the fused qkv weight are applied separately."""
        dim = x.shape[-1]
        (w_q, w_kv), (b_q, b_kv) = self.qkv.weight.split((dim, 2 * dim)), self.qkv.bias.split((dim, 2 * dim))
        q = F.linear(x[:, :queries], w_q, b_q)
        k, v = F.linear(x, w_kv, b_kv).chunk(2, dim=-1)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)


class TalkingHeadsAttention(SelfAttention):
    """Self-attention whose heads are mixed before and after softmax by two H x H Linear layers (CaiT).

    With scores S = q k^T / sqrt(d), (B, H, Q, K): out = (W_w softmax(W_l S + b_l) + b_w) v, where W_l and W_w act on
    the dimension of the heads. The recorded map is softmax(W_l S + b_l), before the second mixing.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout)
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)

    def attend_plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q * self.scale @ k.transpose(-2, -1)
        # a Linear acts on the last dimension: move the heads there and back
        scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = scores.softmax(dim=-1)
        mixed = self.proj_w(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return mixed @ v, weights

    def attend_fast(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mix heads as W (H, H) @ S (H, Q K), in the layout that the scores already have, without a permute.

        The first bias adds the same number to all scores of a query, which softmax cancels, so it is left out. The
        second one adds bias * sum(v), which takes no pass over the scores.
        """
        if not (replaceable(self.proj_l, nn.Linear) and replaceable(self.proj_w, nn.Linear)):
            return self.attend_plain(q, k, v)[0]
        # scaling W_l, (H, H), is cheaper than scaling q
        before: Tensor = self.proj_l.weight * self.scale
        shift: Tensor = self.proj_w.bias
        if not eager_inference():
            # adds nothing, but gives the first bias a gradient of zero: DDP waits for the gradient of every parameter
            shift = shift + 0 * self.proj_l.bias
        if takes_kernels(q) and (not q.requires_grad or enough_images(len(q))):
            mixed = torch.ops.patchloom.talking_heads(q, k, v, before, self.proj_w.weight, shift)
            return mixed.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mix = talking_heads_by_image if q.is_cpu and eager_inference() else talking_heads
        return mix(q, k, v, before, self.proj_w.weight, shift[:, None, None] * v.sum(dim=-2, keepdim=True))


def enough_images(images: int) -> bool:
    """Whether the kernel of talking-heads attention is faster in training. Its backward pass uses one thread per image,
    so it loses when half of the threads or more would be idle (measured by benchmarks/choices.py)."""
    return 2 * images > torch.get_num_threads()


def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """mix(after, softmax(mix(before, q k^T))) v + shift for a whole batch, (B, H, Q, d), differentiable.

    `before` and `after` are (H, H), with the scale of the scores in `before`; `shift` is (B, H, 1, d).
    """
    scores = q @ k.transpose(-2, -1)
    weights = (before @ scores.flatten(2)).view_as(scores).softmax(dim=-1)
    return (after @ weights.flatten(2)).view_as(scores) @ v + shift


def talking_heads_by_image(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor, shift: Tensor) -> Tensor:
    """`talking_heads` one image at a time, in two buffers (H, Q, K) that stay in the processor's cache.

    For inference only, since it writes in place.
    """
    before, after, shift = before.to(q.dtype), after.to(q.dtype), shift.to(q.dtype)
    images, heads, queries, width = q.shape
    first = q.new_empty(heads, queries, k.shape[-2])
    second = torch.empty_like(first)
    # the same memory as (H, Q K) matrices, for mixing by one matrix product; the buffers take turns
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
    """Attention of few queries to all tokens without computing keys and values.

    Since q (Wk y) = (Wk^T q) y, the queries are projected instead of all tokens; since attention weights sum to 1, Wv
    can be applied after the weighted mean of y. The bias of the keys adds the same number to all scores of a query,
    which softmax cancels.

    Args:
        q: (B, Q, H, d), already scaled.
        y: (B, N, D), the tokens.
        keys: (H, d, D), the weight of the key projection.
        values: (H, d, D), the weight of the value projection.
        shift: (H, d), the bias of the value projection.

    Returns:
        (B, Q, D).
    """
    queries = torch.einsum("bqhd,hde->bhqe", q, keys).flatten(1, 2)  # (B, H Q, D)
    means = torch.bmm(torch.bmm(queries, y.transpose(1, 2)).softmax(dim=-1), y).unflatten(1, (q.shape[2], -1))
    return (torch.einsum("bhqe,hde->bqhd", means, values) + shift).flatten(2)


def few_queries(dim: int, heads: int) -> int:
    """The number of queries up to which `attend_without_keys` is faster than projecting all tokens, as measured by
    benchmarks/choices.py."""
    return dim // (4 * heads)


class ClassAttention(Attention):
    """The first `queries` tokens attend to all tokens, (B, N, D) -> (B, queries, D); patches are not updated (CaiT:
    ICCV section 3, thesis 3.6).

    In training with few queries, keys and values are not computed (`attend_without_keys`), unless the plain form is
    selected.

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
        plain_layers = not self.recorders and replaceable(self.k, nn.Linear) and replaceable(self.v, nn.Linear)
        if self.training and self.fast and plain_layers and queries <= few_queries(x.shape[-1], self.heads):
            return self.proj(self._attend_few(q, source))
        k, v = self.split_heads(self.k(source)), self.split_heads(self.v(source))
        return self.proj(self.join_heads(self.attend(self.split_heads(q), k, v)))

    def _attend_few(self, q: Tensor, source: Tensor) -> Tensor:
        """(B, Q, D) queries and (B, N, D) tokens -> (B, Q, D), before the output projection."""
        keys, values, shift = (
            part.unflatten(0, (self.heads, -1))
            # 0 * bias gives the bias of the keys a gradient of zero: DDP waits for the gradient of every parameter
            for part in (self.k.weight, self.v.weight, self.v.bias + 0 * self.k.bias)
        )
        return attend_without_keys(q.unflatten(-1, (self.heads, -1)) * self.scale, source, keys, values, shift)


@contextmanager
def capture_attention(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the attention maps of every forward pass inside the block.

    Yields a mapping from layer name to the map of the last forward pass, (B, heads, queries, keys), after softmax.
    Keys are in token order. The logits equal those of the fast form up to rounding. Raises PatchloomError for a fused
    copy, which does not compute maps.

        with capture_attention(model) as maps:
            logits = model(images)
    """
    if not isinstance(model, nn.Module):
        raise PatchloomError(f"Attention is captured from a torch.nn.Module, not {type(model).__name__}.")
    if any(getattr(module, "fused", False) for module in model.modules()):
        raise PatchloomError(
            "A fused copy does not compute attention maps. Capture them from the network it was made from."
        )
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
