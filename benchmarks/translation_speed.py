"""The speed parts of benchmarks/translation.py: training steps and decoding."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.benching.timing import interleaved, ratio
from patchloom.models.translation import TranslationNetwork
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.translation.decoding import DecodingOptions, search
from patchloom.tasks.translation.losses import token_loss
from patchloom.tasks.translation.task import TextBatch
from patchloom.training.optimizers import make_optimizer
from translation_peers import (
    SIZES,
    TRANSFORMER,
    CTranslate,
    TorchTransformer,
    make_network,
    network_config,
    parameters,
    version_of_ctranslate,
)

TORCH, CTRANSLATE = "torch nn.Transformer", "CTranslate2"
CACHED, PLAIN = "with caches", "without caches"
STEPS = 24  # tokens of each translation by networks that are not trained
_SMALL_RATE = 1e-6  # the steps are timed, not learned from

Decode = Callable[[], list[tuple[int, ...]]]


# Training steps


def training_rows(size: str, vocab_size: int, batches: Sequence[TextBatch], rounds: int) -> Iterator[dict[str, Any]]:
    """Steps per second of our networks beside torch's, on the same batches in the same rounds."""
    networks: dict[str, nn.Module] = {kind: make_network(size, kind, vocab_size) for kind in SIZES[size]}
    networks[TORCH] = TorchTransformer(network_config(size, TRANSFORMER, vocab_size))
    calls = {
        name: partial(_train, network.train(), _optimizer(name, network), batches) for name, network in networks.items()
    }
    times = interleaved(calls, rounds, warm_up=1)
    rate = {name: len(batches) / statistics.median(times[name]) for name in networks}
    for name in SIZES[size]:
        middle, low, high = ratio(times, TORCH, name)
        yield {
            "part": "steps",
            "size": size,
            "model": name,
            "peer": TORCH,
            "params": parameters(networks[name]),
            "peer_params": parameters(networks[TORCH]),
            "tokens_per_step": sum(int((labels != 0).sum()) for *_, labels in batches) / len(batches),
            "steps_per_s": rate[name],
            "peer_steps_per_s": rate[TORCH],
            **_ratio(middle, low, high),
        }


def _optimizer(name: str, network: nn.Module) -> torch.optim.Optimizer:
    """Each with its recipe's: Adagrad for ResMLP, Adam for the Transformers."""
    if name == TORCH:
        return torch.optim.Adam(network.parameters(), lr=_SMALL_RATE)
    optimizer = make_optimizer(network, find_recipe(f"{name}_mt@small"))
    for group in optimizer.param_groups:
        group["lr"] = _SMALL_RATE
    return optimizer


def _train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[TextBatch]) -> None:
    for source, target, labels in batches:
        optimizer.zero_grad(set_to_none=True)
        loss, tokens = token_loss(network(source, target), labels, smoothing=0.1)
        (loss / tokens).backward()
        optimizer.step()


# Decoding


def cache_rows(
    size: str, networks: Mapping[str, TranslationNetwork], source: Tensor, options: DecodingOptions, rounds: int
) -> Iterator[dict[str, Any]]:
    """Decoding with caches beside decoding that computes the whole network at every step."""
    for kind, network in networks.items():
        calls = {
            CACHED: partial(_decode, network, [source], options),
            PLAIN: partial(_decode, network, [source], replace(options, cached=False)),
        }
        results, times = _timed(calls, rounds)
        yield {
            "part": "caches",
            **_decoding_row(f"{kind}, {CACHED}", f"{kind}, {PLAIN}", results, times, CACHED, PLAIN),
            "size": size,
            "batch": len(source),
            "equal": _equal(results[CACHED], results[PLAIN]),
        }


def peer_rows(
    size: str, networks: Mapping[str, TranslationNetwork], source: Tensor, options: DecodingOptions, rounds: int
) -> Iterator[dict[str, Any]]:
    """Our networks beside CTranslate2 with the weights of our Transformer: sentence by sentence, and in one batch."""
    if version_of_ctranslate() is None:
        return
    fixed = STEPS if options.eos in options.forbidden else None
    with tempfile.TemporaryDirectory() as folder:
        theirs = CTranslate(networks[TRANSFORMER], options, Path(folder) / "model")
        for chunks in (_one_by_one(source), [source]):
            calls = {kind: partial(_decode, network, chunks, options) for kind, network in networks.items()}
            calls[CTRANSLATE] = partial(_decode_theirs, theirs, chunks, fixed)
            results, times = _timed(calls, rounds)
            for kind in networks:
                yield {
                    "part": "peer",
                    **_decoding_row(kind, CTRANSLATE, results, times, kind, CTRANSLATE),
                    "size": size,
                    "batch": len(chunks[0]),
                    # at a fixed length ours weighs the probability of the end as well
                    "equal": _equal(results[kind], results[CTRANSLATE]) if kind == TRANSFORMER and not fixed else None,
                }


def fixed_length(options: DecodingOptions) -> DecodingOptions:
    """Exactly STEPS tokens per translation, the last of them `eos`, for networks that have not learned when to end."""
    return replace(options, forbidden=(*options.forbidden, options.eos), limit_factor=0.0, limit_extra=STEPS)


def _one_by_one(source: Tensor) -> list[Tensor]:
    """Every source without its padding."""
    return [row[row != 0][None] for row in source]


def _decode(network: TranslationNetwork, chunks: Sequence[Tensor], options: DecodingOptions) -> list[tuple[int, ...]]:
    return [found.tokens for chunk in chunks for found in search(network, chunk, options)]


def _decode_theirs(theirs: CTranslate, chunks: Sequence[Tensor], steps: int | None) -> list[tuple[int, ...]]:
    """With a fixed length without the last token, in whose place ours have `eos`."""
    last = None if steps is None else steps - 1
    return [tokens[:last] for chunk in chunks for tokens in theirs.translate(chunk, steps)]


def _timed(calls: Mapping[str, Decode], rounds: int) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[float]]]:
    """The translations of each, which also warms up, and the seconds of each call."""
    return {name: call() for name, call in calls.items()}, interleaved(calls, rounds, warm_up=0)


def _decoding_row(
    model: str,
    peer: str,
    results: Mapping[str, list[tuple[int, ...]]],
    times: Mapping[str, list[float]],
    ours: str,
    theirs: str,
) -> dict[str, Any]:
    """Tokens count with `eos`. The ratio is that of tokens per second, since lengths may differ."""
    tokens = {name: sum(len(each) + 1 for each in results[name]) for name in (ours, theirs)}
    factor = tokens[ours] / tokens[theirs]
    return {
        "model": model,
        "peer": peer,
        "tokens": tokens[ours],
        "tokens_per_s": tokens[ours] / statistics.median(times[ours]),
        "peer_tokens_per_s": tokens[theirs] / statistics.median(times[theirs]),
        **_ratio(*(factor * value for value in ratio(times, theirs, ours))),
    }


def _equal(ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> float:
    """The fraction of translations that are equal to the token."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _ratio(middle: float, low: float, high: float) -> dict[str, float]:
    return {"ratio": middle, "low": low, "high": high}
