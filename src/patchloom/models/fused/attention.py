"""Attention of a fused copy: the norm's affine folded into q, k and v, the residual scale into the projection."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.kernels import native
from patchloom.layers.attention import (
    Attention,
    ClassAttention,
    SelfAttention,
    TalkingHeadsAttention,
    attend_without_keys,
    few_queries,
    talking_heads_by_image,
)
from patchloom.layers.residual import Branch
from patchloom.models.fused.folding import (
    FoldedLinear,
    Form,
    fold_input,
    fold_output,
    norm_parts,
    stack_inputs,
    stack_outputs,
)

FEW_QUERIES = 8  # below, packing all keys for them costs what it gains or more (benchmarks/choices.py)


class FusedAttention(nn.Module):
    """total += scale(attention(norm(x))), for self-attention, talking heads and class-attention.

    `beside`: parallel branches of plain self-attention, whose heads stand side by side with those of `branch`.
    """

    before: Tensor | None
    after: Tensor | None
    shift: Tensor | None

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__()
        attention, branches = branch.fn, (branch, *beside)
        assert isinstance(attention, Attention)
        self.heads, self.scale = len(branches) * attention.heads, attention.scale
        self.in_keys = getattr(attention, "in_keys", True)
        self.form = form
        for name in ("before", "after", "shift"):
            self.register_buffer(name, None)
        if isinstance(attention, TalkingHeadsAttention):
            # Talking heads mix the scores of the heads before softmax (proj_l) and the weights after it (proj_w).
            # The scale of the scores is a factor of the first mixing matrix.
            self.before, self.after = attention.proj_l.weight * self.scale, attention.proj_w.weight.clone()
            self.shift = attention.proj_w.bias.clone()
            # the bias of proj_l shifts all scores of a query alike, which softmax cancels
            self.scale = 1.0  # it is in `before`
        self.eps = norm_parts(branch.norm)[0]
        # Branches side by side: the heads of all of them in one attention. A product for q, one for k and one for v
        # then serve every branch, which is what makes parallel branches cheap at batch 1 ("Three things", section 3).
        thirds = [[part.chunk(3) for part in _folded_projections(one)] for one in branches]
        weight, bias = stack_inputs(
            [(w[i], b[i]) for i in range(3) for w, b in thirds]
        )  # all q, then all k, then all v
        self.inner = len(weight) // 3
        self.qkv = FoldedLinear(weight, bias, form)
        self.few = FewQueries(weight, bias, self.heads, self.scale) if form.few and self.before is None else None
        # LayerScale multiplies the output of proj, so it becomes a factor of its rows. The sum over branches is a sum
        # of products, hence one product with their weights side by side.
        projs = [fold_output(cast(Attention, one.fn).proj, one.scale) for one in branches]
        self.proj = FoldedLinear(*stack_outputs(projs), form)

    def mixing(self) -> list[Tensor]:
        """The mixing matrices of talking heads, or nothing."""
        return [part for part in (self.before, self.after, self.shift) if part is not None]

    def weights(self) -> list[Tensor]:
        """As the kernel takes them, in its order."""
        mixing = self.mixing()
        return [*self.qkv.packed(), *self.proj.packed(), *(native.whole_mixing(*mixing) if mixing else ())]

    def forward(self, total: Tensor, x: Tensor, queries: int | None = None) -> Tensor:
        if self.form.kernels and queries is None:  # norm, projections, attention and sum in one call
            layers, mixing = (*self.qkv.packed(), *self.proj.packed()), self.mixing()
            rest = self.heads, self.inner, self.scale, self.eps, mixing
            torch.ops.patchloom.attention_(total, None if x is total else x, *layers, *rest)
            return total
        # The last block computes the class token alone: keys and values of all tokens would be most of its cost.
        if queries is not None and self.few is not None and queries <= self.few.most:
            y = x if self.eps < 0 else F.layer_norm(x, x.shape[-1:], eps=self.eps)
            return self.proj.add_to(total, self.few(y[:, :queries], y if self.in_keys else y[:, queries:]))
        # The form in torch operators, for devices and number types without a kernel.
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x, queries))
        return self.proj.add_to(total, self.attend(q, k, v))

    def project(self, x: Tensor, queries: int | None) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, Q, inner) and twice (B, K, inner); inner is P D with P branches."""
        if queries is None:
            return self.qkv(x, self.eps).chunk(3, dim=-1)
        inner = self.inner
        source = x if self.in_keys else x[:, queries:]
        # Class-attention of CaiT's kind reads queries from the class token, and keys from all tokens or from patches
        # only.
        q, kv = self.qkv.part(x[:, :queries], 0, inner, self.eps), self.qkv.part(source, inner, 3 * inner, self.eps)
        return q, *kv.chunk(2, dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) and twice (B, H, K, d) -> (B, Q, inner)."""
        # Without talking heads this is softmax(q k^T scale) v.
        if self.before is None or self.after is None or self.shift is None:
            if self.form.kernels and q.shape[2] >= FEW_QUERIES:
                return torch.ops.patchloom.attention(q, k, v, self.scale, self.form.int8)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.form.kernels:
            return torch.ops.patchloom.talking_heads(q, k, v, self.before, self.after, self.shift)
        # a constant added to every weight of a head adds that multiple of the sum of its values
        lift = self.shift[:, None, None] * v.sum(dim=-2, keepdim=True)
        return talking_heads_by_image(q, k, v, self.before, self.after, lift).transpose(1, 2).flatten(2)


class FewQueries(nn.Module):
    """Attention of few tokens to all, without keys and values: see `attend_without_keys`.

    Keys and values of N tokens cost 2 N D^2; with few queries the products in another order cost less."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor
    v_bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, heads: int, scale: float) -> None:
        super().__init__()
        inner = len(weight) // 3
        self.heads, self.scale = heads, scale
        # The largest number of queries for which the other order of products is the cheaper one.
        self.most = few_queries(inner, heads)
        for name, part in zip(("q", "k", "v"), weight.split(inner), strict=True):
            self.register_buffer(name, part.clone() if name == "q" else part.unflatten(0, (heads, -1)).clone())
        self.register_buffer("q_bias", bias[:inner].clone())
        self.register_buffer("v_bias", bias[2 * inner :].unflatten(0, (heads, -1)).clone())

    def forward(self, queries: Tensor, y: Tensor) -> Tensor:
        """(B, Q, D), (B, N, D) -> (B, Q, inner), both normalised."""
        q = F.linear(queries, self.q, self.q_bias).mul_(self.scale).unflatten(-1, (self.heads, -1))
        return attend_without_keys(q, y, self.k, self.v, self.v_bias)


def _folded_projections(branch: Branch) -> tuple[Tensor, Tensor]:
    """Weights (3 D, D) and bias of q, k and v in a row, with the norm's affine."""
    _, *affine = norm_parts(branch.norm)
    return fold_input(*_projections(cast(Attention, branch.fn)), *affine)


def _projections(attention: Attention) -> tuple[Tensor, Tensor]:
    if isinstance(attention, SelfAttention):
        return attention.qkv.weight, attention.qkv.bias
    assert isinstance(attention, ClassAttention)
    layers = (attention.q, attention.k, attention.v)
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
