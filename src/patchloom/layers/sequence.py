"""Layers for sequences of tokens: mixing with or without attention, cross-attention, and the caches of decoding.

Shapes: B sequences, T tokens, S source tokens, D channels, H heads, d = D / H. A mask (B, T) is True where there is a
token and False where there is padding. When a sequence is generated, x is (B, K, D): one new token of each of K
hypotheses per sequence, B K = N rows in all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.attention import Attention
from patchloom.layers.inplace import drop
from patchloom.layers.mixing import CrossPatchLinear

_FIRST_CAPACITY = 16  # steps; a full buffer is doubled


class StepCache:
    """What a layer keeps of the earlier steps of decoding: `parts` tensors (steps, N, ...).

    Steps come first, so that a new one is written without moving the others and a row of a mixing matrix multiplies
    all hypotheses at once.
    """

    def __init__(self, parts: int = 1) -> None:
        self.buffers: list[Tensor | None] = [None] * parts
        self.length = 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """Add one step, (N, ...) per part; returns all steps so far, (steps, N, ...) per part."""
        self.length += 1
        filled = []
        for i, step in enumerate(new):
            buffer = self._with_space(self.buffers[i], step)
            buffer[self.length - 1] = step
            self.buffers[i] = buffer
            filled.append(buffer[: self.length])
        return filled

    def _with_space(self, buffer: Tensor | None, step: Tensor) -> Tensor:
        if buffer is None:
            return step.new_empty(_FIRST_CAPACITY, *step.shape)
        if self.length <= len(buffer):
            return buffer
        larger = buffer.new_empty(2 * len(buffer), *buffer.shape[1:])
        larger[: self.length - 1] = buffer
        return larger

    def select(self, rows: Tensor) -> None:
        """Keep these rows (M,) of the N, in this order; a row may come more than once."""
        for i, buffer in enumerate(self.buffers):
            if buffer is not None:
                kept = buffer.new_empty(len(buffer), len(rows), *buffer.shape[2:])
                torch.index_select(buffer[: self.length], 1, rows, out=kept[: self.length])
                self.buffers[i] = kept


class SequenceLinear(CrossPatchLinear):
    """The cross-patch linear layer on sequences: out[:, i] = sum_j A[i, j] x[:, j] + b[i] (thesis 4.2, 4.3.5).

    A is max_length x max_length and is cut to the T tokens of a batch; padding contributes zero. With `causal` only the
    lower triangle of A is used, so that no token sees a later one. In training with dropout on the output.
    """

    def __init__(self, max_length: int, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__(max_length)
        self.causal, self.dropout = causal, dropout

    def init_weights(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: StepCache | None = None) -> Tensor:
        """(B, T, D) with mask (B, T) -> (B, T, D); with a cache, the next tokens (B, K, D) -> (B, K, D)."""
        if cache is not None:
            return self.step(x, cache)
        length = x.shape[1]
        weight = self.weight[:length, :length]
        if self.causal:
            weight = weight.tril()
        if mask is not None:
            x = x * mask[..., None]
        out = torch.baddbmm(self.bias[:length, None], weight.expand(x.shape[0], -1, -1), x)
        return drop(out, self.dropout, self.training)

    def step(self, x: Tensor, cache: StepCache) -> Tensor:
        """One row of A times all tokens so far: row t of what `forward` gives for the whole sequence."""
        (tokens,) = cache.append(x.flatten(0, 1))
        t = cache.length - 1
        # not addmv, which the exporter to ONNX translates wrongly
        return torch.addmm(self.bias[t], self.weight[t : t + 1, : t + 1], tokens.flatten(1)).view_as(x)

    def extra_repr(self) -> str:
        return f"{self.in_features}, causal={self.causal}"


class MaskedAttention(Attention):
    """Attention with a mask, (B, 1, 1 or Q, K), True where a key may be attended to, and dropout on the output."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads)
        self.dropout = dropout

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `attend`, over the keys that the mask allows; every query must have at least one."""
        if self.fast and not self.recorders:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q * self.scale @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(dim=-1)
        for record in self.recorders:
            record(weights)
        return weights @ v

    def project_out(self, attended: Tensor) -> Tensor:
        """(B, H, Q, d) -> (B, Q, D)."""
        return drop(self.proj(self.join_heads(attended)), self.dropout, self.training)


class SequenceAttention(MaskedAttention):
    """Self-attention of a sequence; with `causal` no token sees a later one."""

    def __init__(self, dim: int, heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout)
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: StepCache | None = None) -> Tensor:
        """(B, T, D) with mask (B, T) -> (B, T, D); with a cache, the next tokens (B, K, D) -> (B, K, D)."""
        if cache is not None:
            return self.step(x, cache)
        q, k, v = (self.split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        return self.project_out(self.attend_masked(q, k, v, self._allowed(x, mask)))

    def _allowed(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The keys of each query, (B, 1, T, T). A token always sees itself: a row without keys would be NaN."""
        if mask is None and not self.causal:
            return None
        square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        allowed = (square.tril() if self.causal else square)[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None]
        return allowed | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)

    def step(self, x: Tensor, cache: StepCache) -> Tensor:
        q, k, v = self.qkv(x).flatten(0, 1).unflatten(-1, (3, self.heads, -1)).unbind(1)  # (N, H, d)
        keys, values = (part.permute(1, 2, 0, 3) for part in cache.append(k, v))  # (N, H, steps, d)
        attended = self.attend_masked(q[:, :, None], keys, values, None)  # (N, H, 1, d)
        return self.project_out(attended).view_as(x)


class CrossAttention(MaskedAttention):
    """Tokens of the target attend to those of the source. Keys and values depend on the source alone: `keys_values`
    computes them once per source, and every step of decoding uses them again."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout)
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D), the encoder's output -> keys and values (B, H, S, d)."""
        keys, values = self.kv(memory).chunk(2, dim=-1)
        return self.split_heads(keys), self.split_heads(values)

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], source_mask: Tensor) -> Tensor:
        """(B, T, D), keys and values (B, H, S, d) and the source's mask (B, S) -> (B, T, D)."""
        q = self.split_heads(self.q(x))
        return self.project_out(self.attend_masked(q, *keys_values, source_mask[:, None, None]))
