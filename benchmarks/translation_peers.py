"""What benchmarks/translation.py compares: our networks in pairs of equal parameters, torch's nn.Transformer, and
CTranslate2 with the weights of our Transformer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.models.registry import build, find_config
from patchloom.models.translation import PADDING, TranslationConfig, TranslationNetwork, sinusoids
from patchloom.tasks.translation.decoding import DecodingOptions

RESMLP, TRANSFORMER = "resmlp", "transformer"
_EPS = 1e-6  # of every LayerNorm
_SMALL = {"dim": 128, "heads": 4}
# name and options of each network; ResMLP's FFN is wider, so that both have equally many parameters within 1 %
SIZES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "small": {
        RESMLP: ("resmlp_mt_nano", {**_SMALL, "hidden": 752}),
        TRANSFORMER: ("transformer_mt_nano", {**_SMALL, "hidden": 512}),
    },
    "base": {RESMLP: ("resmlp_mt_6", {"hidden": 3008}), TRANSFORMER: ("transformer_mt_6", {})},
}


def network_config(size: str, kind: str, vocab_size: int) -> TranslationConfig:
    name, options = SIZES[size][kind]
    config: Any = find_config(name).replace(**options, vocab_size=vocab_size)
    return config


def make_network(size: str, kind: str, vocab_size: int) -> TranslationNetwork:
    torch.manual_seed(0)
    network: Any = build(network_config(size, kind, vocab_size))
    return network


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class TorchTransformer(nn.Module):
    """nn.Transformer with the embeddings, positions and logits of our Transformer: (B, S), (B, T) -> (B, T, V)."""

    positions: Tensor

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.register_buffer("positions", sinusoids(config.max_length, config.dim), persistent=False)
        post = config.norm_place == "post"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors, which only inference uses, need the norm at the end
            self.transformer = nn.Transformer(
                config.dim,
                config.heads,
                config.depth,
                config.depth,
                config.hidden,
                config.dropout,
                batch_first=True,
                norm_first=not post,
                layer_norm_eps=_EPS,
            )
        if post:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == PADDING
        out = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(out, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions[: tokens.shape[1]]


class CTranslate:
    """CTranslate2 on one thread in float32, with the weights of our Transformer. Tokens are the decimal ids."""

    def __init__(self, network: TranslationNetwork, options: DecodingOptions, folder: Path) -> None:
        import ctranslate2

        _write_ctranslate(network, options, folder)
        self.options, self.max_length = options, network.config.max_length
        self.translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)

    def translate(self, source: Tensor, steps: int | None = None) -> list[tuple[int, ...]]:
        """Token ids of the best translation of each source (B, S); `steps`: of exactly so many tokens."""
        rows = [[str(token) for token in row if token != PADDING] for row in source.tolist()]
        unwanted = {PADDING, self.options.bos, *self.options.forbidden} - {self.options.eos}
        limit = int(source.shape[1] * self.options.limit_factor) + self.options.limit_extra
        found = self.translator.translate_batch(
            rows,
            beam_size=self.options.beam,
            length_penalty=self.options.length_penalty,
            suppress_sequences=[[str(token)] for token in sorted(unwanted)],
            max_decoding_length=steps or min(limit, self.max_length),
            min_decoding_length=steps or 1,
        )
        return [tuple(map(int, each.hypotheses[0])) for each in found]


def version_of_ctranslate() -> str | None:
    """None where CTranslate2 is not installed."""
    try:
        import ctranslate2
    except ImportError:
        return None
    return ctranslate2.__version__


def _write_ctranslate(network: TranslationNetwork, options: DecodingOptions, folder: Path) -> None:
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config = network.config
    assert config.mixing == "attention"
    assert config.activation == "relu"
    pre = config.norm_place == "pre"
    spec = TransformerSpec.from_config(config.depth, config.heads, pre_norm=pre, activation=Activation.RELU)
    for side, blocks, norm in (
        (spec.encoder, network.encoder, network.encoder_norm),
        (spec.decoder, network.decoder, network.decoder_norm),
    ):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _array(network.embedding.weight)
        side.position_encodings.encodings = _array(network.positions)
        if pre:
            _copy_norm(side.layer_norm, norm)
        for layer, block in zip(side.layer, blocks, strict=True):
            _copy_block(layer, block, pre)
    spec.decoder.projection.weight = _array(network.embedding.weight)
    spec.config.layer_norm_epsilon = _EPS
    names = [str(token) for token in range(config.vocab_size)]
    spec.config.bos_token = spec.config.decoder_start_token = names[options.bos]
    spec.config.eos_token = names[options.eos]
    spec.config.unk_token = names[PADDING]  # every source token is in the vocabulary
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _copy_block(layer: Any, block: Any, pre: bool) -> None:
    mixing = block.mixing.branches[0].fn
    parts: list[tuple[Any, Any, Sequence[nn.Linear]]] = [
        (layer.self_attention, block.mixing, (mixing.qkv, mixing.proj))
    ]
    if hasattr(block, "cross"):
        cross = block.cross.branches[0].fn
        parts.append((layer.attention, block.cross, (cross.q, cross.kv, cross.proj)))
    for spec, residual, linears in parts:
        _copy_norm(spec.layer_norm, residual.branches[0].norm if pre else residual.norm)
        for target, linear in zip(spec.linear, linears, strict=True):
            _copy_linear(target, linear)
    ffn = block.ffn.branches[0]
    _copy_norm(layer.ffn.layer_norm, ffn.norm if pre else block.ffn.norm)
    _copy_linear(layer.ffn.linear_0, ffn.fn.fc1)
    _copy_linear(layer.ffn.linear_1, ffn.fn.fc2)


def _copy_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight, spec.bias = _array(linear.weight), _array(linear.bias)


def _copy_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().numpy()
