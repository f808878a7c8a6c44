"""Encoder-decoder networks for translation: sequence-to-sequence ResMLP (thesis 4.2, 4.3.5) and the Transformer.

ResMLP replaces self-attention by one matrix over positions, A, in every layer; A is triangular in the decoder:

encoder   x + gamma_1 * A norm(x)          x + gamma_2 * FFN(norm(x))
decoder   x + gamma_1 * tril(A) norm(x)    x + gamma_2 * cross-attention(norm(x), memory)    x + gamma_3 * FFN(norm(x))

A has max_length rows and is cut to the longest sequence of a batch; padding contributes zero. Embedding and output
share one matrix. The Transformer has the same interface, with self-attention and, in the base model, the norm after
the sum (Vaswani et al. 2017). What the thesis leaves open and is chosen here: LayerNorm, biases, 8 heads of
cross-attention, and the sinusoidal positions of the Transformer, of which the thesis replaces self-attention only; a
network without them learns too, in more steps.

Shapes: source (B, S) and target (B, T) hold token ids, 0 is padding; logits (B, T, V); memory (B, S, D).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import drop
from patchloom.layers.norms import make_norm
from patchloom.layers.positions import sinusoids
from patchloom.layers.residual import Branch, Residual
from patchloom.layers.scales import LayerScale
from patchloom.layers.sequence import CrossAttention, SequenceAttention, SequenceLinear, StepCache
from patchloom.models.config import BaseConfig, check_heads, check_rate
from patchloom.models.registry import Paper, register, register_architecture

PADDING = 0  # the token id of padding, in every vocabulary


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(BaseConfig):
    """The choices of an encoder-decoder, the same for both sides."""

    architecture: ClassVar[str] = "translation"
    kind: ClassVar[str] = "text"

    vocab_size: int = field(default=32000, metadata={"least": 2, "most": 10**7})
    max_length: int = field(default=256, metadata={"least": 2, "most": 1 << 16})  # tokens of a source or of a target
    dim: int = field(default=512, metadata={"most": 1 << 17})
    depth: int = field(default=6, metadata={"most": 1000})  # layers of the encoder, and of the decoder
    hidden: int = field(default=2048, metadata={"most": 1 << 20})  # width inside the FFN
    heads: int = 8  # of cross-attention, and of self-attention
    mixing: Literal["linear", "attention"] = "linear"
    norm: Literal["layer", "affine"] = "layer"
    norm_place: Literal["pre", "post"] = "pre"  # before each branch, or after each sum
    activation: Literal["gelu", "relu", "silu", "hardswish"] = "gelu"
    positions: Literal["none", "sinusoidal"] = "sinusoidal"  # added to the embeddings
    scale_value: float | None = 0.2  # the first value of LayerScale's factors; None: no LayerScale
    dropout: float = 0.0  # of embeddings and of the output of every branch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self.name, "dropout", self.dropout)
        check_heads(self)
        if self.dim % 2 and self.positions == "sinusoidal":
            raise PatchloomError(f"The dim of {self.name} must be even for sinusoidal positions, not {self.dim}.")

    @property
    def scale_start(self) -> float | None:
        """The first value of LayerScale's factors; None for a network without LayerScale."""
        return self.scale_value


class EncoderBlock(nn.Module):
    """A mixing residual, then an FFN residual."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.mixing = _residual(config, _mixing(config, causal=False))
        self.ffn = _residual(config, _ffn(config))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, S, D) and mask (B, S) -> (B, S, D)."""
        return self.ffn(self.mixing(x, mask=mask))


class DecoderBlock(nn.Module):
    """A causal mixing residual, a cross-attention residual, then an FFN residual."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.mixing = _residual(config, _mixing(config, causal=True))
        self.cross = _residual(config, CrossAttention(config.dim, config.heads, config.dropout))
        self.ffn = _residual(config, _ffn(config))

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What cross-attention reads of the encoder's output (B, S, D): (B, H, S, d) each."""
        attention = self.cross.branches[0].fn
        assert isinstance(attention, CrossAttention)
        return attention.keys_values(memory)

    def forward(
        self,
        x: Tensor,
        keys_values: tuple[Tensor, Tensor],
        source_mask: Tensor,
        mask: Tensor | None = None,
        cache: StepCache | None = None,
    ) -> Tensor:
        """(B, T, D) and mask (B, T) -> (B, T, D); with a cache, the next tokens (B, K, D) -> (B, K, D)."""
        x = self.mixing(x, mask=mask, cache=cache)
        x = self.cross(x, keys_values=keys_values, source_mask=source_mask)
        return self.ffn(x)


class Encoded(NamedTuple):
    """The encoder's output (B, S, D) and where it has tokens (B, S)."""

    memory: Tensor
    mask: Tensor


class DecoderState:
    """Everything that decoding keeps between steps, for B sources with K hypotheses each.

    Computed once per source: keys and values of cross-attention, which the K hypotheses share. Grown by each step: what
    the mixing layers keep of earlier tokens, per hypothesis.
    """

    def __init__(self, keys_values: list[tuple[Tensor, Tensor]], source_mask: Tensor, parts: int) -> None:
        self.keys_values, self.source_mask = keys_values, source_mask
        self.caches = [StepCache(parts) for _ in keys_values]

    @property
    def length(self) -> int:
        """Steps so far."""
        return self.caches[0].length

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these hypotheses, by their row in (B K,), and these sources out of B; None: all of them."""
        for cache in self.caches:
            cache.select(rows)
        if sources is not None:
            self.keys_values = [(keys[sources], values[sources]) for keys, values in self.keys_values]
            self.source_mask = self.source_mask[sources]


class TranslationNetwork(nn.Module):
    """See the module's docstring; `config` decides every choice."""

    ROLES = {"embedding": "stem"}

    positions: Tensor | None
    load_report: Any = None  # set by patchloom.load
    vocabulary: bytes | None = None  # of sentencepiece; travels with the weights, as do the others
    pair: tuple[str, str] | None = None  # source and target language
    beam: int = 4
    length_penalty: float = 0.6

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.depth))
        self.encoder_norm = _final_norm(config)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.depth))
        self.decoder_norm = _final_norm(config)
        table = sinusoids(config.max_length, config.dim) if config.positions == "sinusoidal" else None
        self.register_buffer("positions", table, persistent=False)
        self.init_weights()

    def describe_text(self, vocabulary: bytes, pair: tuple[str, str], beam: int, length_penalty: float) -> None:
        """Set what travels with the weights: the vocabulary, the languages, and how translations are searched for."""
        self.vocabulary, self.pair, self.beam, self.length_penalty = vocabulary, pair, beam, length_penalty

    def metadata(self) -> dict[str, Any]:
        """What describes the network beside its tensors, as JSON."""
        return {
            "config": self.config.to_json(),
            "pair": self.pair and list(self.pair),
            "vocabulary": self.vocabulary and base64.b64encode(self.vocabulary).decode(),
            "beam": self.beam,
            "length_penalty": self.length_penalty,
        }

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """The inverse of `metadata`, for a network that has the config already. Raises PatchloomError for values that
        `metadata` does not give."""
        try:
            # A network that was saved before any training has neither.
            if metadata.get("vocabulary") and metadata.get("pair"):
                source, target = metadata["pair"]
                vocabulary = base64.b64decode(metadata["vocabulary"], validate=True)
                beam, penalty = int(metadata["beam"]), float(metadata["length_penalty"])
                self.describe_text(vocabulary, (str(source), str(target)), beam, penalty)
        except (ValueError, TypeError, KeyError) as error:
            raise PatchloomError(f"The metadata of this {self.config.name} is damaged: {error!r}.") from error

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each token of the target, from token ids (B, S) and (B, T).

        Raises PatchloomError for anything but token ids, and for sequences longer than `max_length`.
        """
        return self.decode(self.encode(source), target)

    def encode(self, source: Tensor) -> Encoded:
        """The encoder's output for token ids (B, S)."""
        self._check(source, "source")
        mask = source != PADDING
        x = self._embed(source)
        for block in self.encoder:
            x = block(x, mask)
        return Encoded(self.encoder_norm(x), _at_least_one(mask))

    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        """Logits (B, T, V) for the target's token ids (B, T)."""
        self._check(target, "target")
        mask = target != PADDING
        x = self._embed(target)
        for block, keys_values in zip(self.decoder, self._keys_values(encoded.memory), strict=True):
            x = block(x, keys_values, encoded.mask, mask)
        return self._logits(x)

    def start(self, encoded: Encoded) -> DecoderState:
        """The state before the first step of decoding."""
        keys_values = list(self._keys_values(encoded.memory))
        return DecoderState(keys_values, encoded.mask, parts=1 if self.config.mixing == "linear" else 2)

    def step(self, state: DecoderState, tokens: Tensor) -> Tensor:
        """Logits (B, K, V) of the tokens after `tokens` (B, K), the last ones of K hypotheses per source.

        The same as the last of `decode` on the whole hypotheses. The state moves on by one step.
        """
        t = state.length
        if t >= self.config.max_length:
            raise PatchloomError(self._too_long("target", t + 1))
        x = self._embed(tokens, None if self.positions is None else self.positions[t])
        for block, keys_values, cache in zip(self.decoder, state.keys_values, state.caches, strict=True):
            x = block(x, keys_values, state.source_mask, cache=cache)
        return self._logits(x)

    def _keys_values(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of cross-attention, layer by layer."""
        for block in self.decoder:
            assert isinstance(block, DecoderBlock)
            yield block.keys_values(memory)

    def _embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embeddings times sqrt(D), with the positions given or those of a whole sequence (Vaswani et al., 3.4)."""
        x = self.embedding(tokens) * math.sqrt(self.config.dim)
        if self.positions is not None:
            x = x + (self.positions[: tokens.shape[1]] if positions is None else positions)
        return drop(x, self.config.dropout, self.training)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _check(self, tokens: Tensor, side: str) -> None:
        name = self.config.name
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] == 0:
            found = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise PatchloomError(f"{name} takes a {side} of token ids, (batch, length), not {found}.")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise PatchloomError(f"{name} takes token ids of {torch.int64}, not a {side} of {tokens.dtype}.")
        if tokens.shape[1] > self.config.max_length:
            raise PatchloomError(self._too_long(side, tokens.shape[1]))

    def _too_long(self, side: str, length: int) -> str:
        config = self.config
        return (
            f"A {side} of {length} tokens is longer than the {config.max_length} that this {config.name} takes: "
            f"shorten it, or create the model with a larger max_length."
        )

    def init_weights(self) -> None:
        """As Ott et al. 2018, whose set-up the thesis follows: linear layers by Xavier's rule with biases of 0,
        embeddings N(0, 1 / D)."""
        for module in self.modules():
            if isinstance(module, SequenceLinear):
                module.init_weights()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=self.config.dim**-0.5)


def _at_least_one(mask: Tensor) -> Tensor:
    """The mask with a key for every source: attention over nothing, a source of padding alone, would be NaN."""
    return torch.cat([mask[:, :1] | ~mask.any(dim=1, keepdim=True), mask[:, 1:]], dim=1)


def _residual(config: TranslationConfig, layer: nn.Module) -> Residual:
    post = config.norm_place == "post"
    scale = None if config.scale_value is None else LayerScale(config.dim, config.scale_value)
    norm = make_norm("none" if post else config.norm, config.dim)
    return Residual([Branch(norm, layer, scale)], norm=make_norm(config.norm, config.dim) if post else None)


def _mixing(config: TranslationConfig, causal: bool) -> nn.Module:
    if config.mixing == "linear":
        return SequenceLinear(config.max_length, causal, config.dropout)
    return SequenceAttention(config.dim, config.heads, causal, config.dropout)


def _ffn(config: TranslationConfig) -> FFN:
    return FFN(config.dim, config.hidden, config.activation, config.dropout, hidden_dropout=0.0)


def _final_norm(config: TranslationConfig) -> nn.Module:
    """The norm after the last block; with post-norm the block has it."""
    return make_norm("none" if config.norm_place == "post" else config.norm, config.dim)


register_architecture(TranslationConfig, TranslationNetwork)  # type: ignore[arg-type]
_THESIS = Paper("thesis 4.3.5", note="the thesis prints no parameter counts")
_BASE = TranslationConfig(
    name="transformer_mt_6",
    family="transformer_mt",
    mixing="attention",
    norm_place="post",
    activation="relu",
    scale_value=None,
)
_NANO: dict[str, Any] = {"max_length": 64, "vocab_size": 4000, "dim": 64, "depth": 2, "hidden": 256, "heads": 4}
_MODELS = [
    (TranslationConfig(name="resmlp_mt_6", family="resmlp_mt"), _THESIS),
    (TranslationConfig(name="resmlp_mt_12", family="resmlp_mt", depth=12), _THESIS),
    (_BASE, Paper("Vaswani et al. 2017, base model", note="65 M with 37,000 tokens")),
    (TranslationConfig(name="resmlp_mt_nano", family="resmlp_mt", **_NANO), Paper("ours, for small texts")),
    (_BASE.replace(name="transformer_mt_nano", norm_place="pre", **_NANO), Paper("ours, for small texts")),
]
for _config, _paper in _MODELS:
    register(_config, _paper)  # type: ignore[arg-type]
