"""docs/results/translation.md, from the rows of benchmarks/translation.py."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from patchloom.models.translation import TranslationConfig
from translation_peers import RESMLP, TRANSFORMER, make_network, parameters, version_of_ctranslate
from translation_speed import STEPS

Row = Mapping[str, Any]
TRIAL = 5  # rounds; with fewer the page says that its figures are no results

PAGE = """# Translation: ResMLP and the Transformer

This page compares the [sequence-to-sequence ResMLP](../translation.md) with the Transformer at equal parameters: quality after equal training on Multi30k, training speed
and decoding speed, beside torch's `nn.Transformer` and CTranslate2.

`{command}`, {date}, {cores} cores ({instructions}), torch {torch}, float32, one thread. Speeds are medians of {rounds} interleaved rounds, ratios are medians
with the quartiles of the rounds.
{trial}
| size | network | width | layers | FFN | heads | tokens | parameters |
| :-- | :-- | --: | --: | --: | --: | --: | --: |
{sizes}

Maximal lengths are 64 tokens (small) and 256 (base). The FFN of ResMLP is wider, so that both networks of a size have equally many parameters within 1 %.
{quality}{steps}{caches}{peer}"""  # noqa: E501
WARNING = "\n**A trial of the script with too few rounds: these numbers are not results.**\n"

QUALITY = """
## Quality at an equal budget

Multi30k English-German, {pairs:,} pairs. Both networks see the same {target_tokens:,} target tokens (of the first seed) in the same batches ({steps:,} steps, {epochs:.1f} epochs), with
their recipes `resmlp_mt@small` (Adagrad) and `transformer_mt@small` (Adam). Beam 4, `test_2016_flickr` ({count:,} sentences), last step.

| network | seed | BLEU | chrF | tokenised BLEU | loss |
| :-- | --: | --: | --: | --: | --: |
{rows}

Mean BLEU: {means}. BLEU: `{bleu}`; chrF: `{chrf}`.
"""  # noqa: E501

STEPS_TEXT = """
## Training steps

Forward, backward and update of the same batches: ResMLP with Adagrad, the Transformers with Adam, ours with the library's implementation of the optimizer and torch's as it
comes. torch's network is `nn.Transformer` with the sizes of our Transformer.

| size | network | parameters | target tokens per step | steps per second | nn.Transformer | speed-up | quartiles |
| :-- | :-- | --: | --: | --: | --: | --: | :-- |
{rows}
"""  # noqa: E501

CACHES_TEXT = """
## Decoding with and without caches

Without caches, every step computes encoder and decoder on all tokens so far. {lengths} *Equal* is the share of translations that agree in every token.

| size | network | sentences per batch | tokens per second | without caches | speed-up | quartiles | equal |
| :-- | :-- | --: | --: | --: | --: | :-- | --: |
{rows}
"""  # noqa: E501

PEER_TEXT = """
## Decoding beside CTranslate2

CTranslate2 {version}, float32, one thread, has the weights of our Transformer; all search with a beam of {beam}. {lengths} *Equal* is the share of translations
in which our Transformer and CTranslate2 agree in every token.

| size | network | sentences per batch | tokens per second | CTranslate2 | ratio | quartiles | equal |
| :-- | :-- | --: | --: | --: | --: | :-- | --: |
{rows}
"""  # noqa: E501
NO_PEER = (
    "\n## Decoding beside CTranslate2\n\nNot measured: CTranslate2 is not installed (`pip install ctranslate2`).\n"
)


def page(rows: Sequence[Row], sizes: Mapping[str, Mapping[str, TranslationConfig]], rounds: int) -> str:
    parts = {part: [row for row in rows if row["part"] == part] for part in ("quality", "steps", "caches", "peer")}
    return PAGE.format(
        command=shlex.join(["python", *sys.argv]),
        date=time.strftime("%Y-%m-%d"),
        cores=torch.multiprocessing.cpu_count(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        rounds=rounds,
        trial=WARNING if rounds < TRIAL else "",
        sizes="\n".join(
            _size_row(size, kind, config) for size, kinds in sizes.items() for kind, config in kinds.items()
        ),
        quality=_quality(parts["quality"]),
        steps=_steps(parts["steps"]),
        caches=_caches(parts["caches"]),
        peer=_peer(parts["peer"]) if parts["peer"] or not parts["caches"] else NO_PEER,
    )


def _size_row(size: str, kind: str, config: TranslationConfig) -> str:
    with torch.device("meta"):
        count = parameters(make_network(size, kind, config.vocab_size))
    cells = (config.dim, config.depth, config.hidden, config.heads, config.vocab_size, f"{count:,}")
    return f"| {size} | {kind} | " + " | ".join(map(str, cells)) + " |"


def _quality(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    means = []
    for kind in (RESMLP, TRANSFORMER):
        scores = [row["bleu"] for row in rows if row["model"] == kind]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        means.append(f"{kind} {statistics.mean(scores):.2f}{spread}")
    ordered = sorted(rows, key=lambda row: (row["model"], row["seed"]))
    table = [
        f"| {row['model']} | {row['seed']} | {row['bleu']:.2f} | {row['chrf']:.2f} | {row['bleu_tokenized']:.2f} "
        f"| {row['loss']:.4f} |"
        for row in ordered
    ]
    shared = {key: rows[0][key] for key in ("pairs", "target_tokens", "steps", "epochs", "count")}
    return QUALITY.format(rows="\n".join(table), means=", ".join(means), **shared, **rows[0]["signatures"])


def _steps(rows: Sequence[Row]) -> str:
    table = [
        f"| {row['size']} | {row['model']} | {row['params']:,} | {row['tokens_per_step']:.0f} "
        f"| {row['steps_per_s']:.2f} | {row['peer_steps_per_s']:.2f} | {_ratio(row)} |"
        for row in rows
    ]
    return STEPS_TEXT.format(rows="\n".join(table)) if rows else ""


def _caches(rows: Sequence[Row]) -> str:
    return CACHES_TEXT.format(rows=_decoding(rows), lengths=_lengths(rows)) if rows else ""


def _peer(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return PEER_TEXT.format(
        rows=_decoding(rows), lengths=_lengths(rows), version=version_of_ctranslate(), beam=rows[0]["beam"]
    )


def _decoding(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"| {row['size']} | {row['model'].split(',')[0]} | {row['batch']} | {row['tokens_per_s']:.0f} "
        f"| {row['peer_tokens_per_s']:.0f} | {_ratio(row)} | {_share(row['equal'])} |"
        for row in rows
    )


def _lengths(rows: Sequence[Row]) -> str:
    trained = sorted({row["size"] for row in rows if row["trained"]})
    others = sorted({row["size"] for row in rows if not row["trained"]})
    said = []
    if trained:
        said.append(f"The networks of size {', '.join(trained)} are the trained ones (seed 0), and end where they end.")
    if others:
        said.append(f"Those of size {', '.join(others)} are not trained: every translation has {STEPS} tokens.")
    return " ".join(said)


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
