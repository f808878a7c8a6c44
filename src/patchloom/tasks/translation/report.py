"""The report of a translation run: metrics, samples with references, and the matrices over positions."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from patchloom.layers.sequence import SequenceLinear
from patchloom.models.translation import TranslationNetwork
from patchloom.pages import data_url
from patchloom.tasks.translation.predict import Translated
from patchloom.tasks.translation.text import ParallelText
from patchloom.training.report import Section
from patchloom.training.run import Run

SAMPLES = 24
_LARGEST_PICTURE = 64  # positions of a matrix that are drawn: later ones are rarely trained
CHARTS: dict[str, dict[str, str]] = {
    "loss per token": {"training": "train_loss", "held out": "loss", "averaged": "ema_loss"},
    "BLEU of greedy translations": {"held out": "greedy_bleu", "averaged": "ema_greedy_bleu"},
    "learning rate": {"": "lr"},
}


def translation_sections(
    run: Run,
    network: TranslationNetwork,
    text: ParallelText,
    translations: Sequence[Translated],
    metrics: Mapping[str, Any],
) -> tuple[str, list[Section]]:
    """The headline, and what follows the curves."""
    sections = [("Samples", _samples(text, translations))]
    if drawn := _matrices(network):
        sections.append(("Matrices over positions", drawn))
    return _headline(run, network, metrics), sections


def _headline(run: Run, network: TranslationNetwork, metrics: Mapping[str, Any]) -> str:
    shown = (("bleu", "BLEU"), ("chrf", "chrF"), ("bleu_tokenized", "BLEU of tokens"))
    cells = "".join(f"<div><b>{metrics[key]:.2f}</b><span class=soft>{name}</span></div>" for key, name in shown)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    signatures = ", ".join(f"{name} {value}" for name, value in metrics["signatures"].items())
    return (
        f"<h1>{escape(network.config.name)} on {escape(str(run.settings['data']))}</h1><div class=figures>{cells}</div>"
        f"<p class=soft>{escape(run.settings['pair'])}, recipe {escape(run.settings['recipe_name'])}; "
        f"{parameters / 1e6:.2f} million parameters, {network.config.vocab_size} tokens. The metrics are of the "
        f"{metrics['count']} sentences of {escape(metrics['split'])}; signatures: {escape(signatures)}.</p>"
    )


def _samples(text: ParallelText, translations: Sequence[Translated]) -> str:
    """Sentences spread over the held-out text, each with its reference and its translation."""
    step = max(1, len(text) // SAMPLES)
    rows = "".join(
        f"<tr><td>{escape(text.source[i])}<td>{escape(text.target[i])}<td>{escape(translations[i].translation)}"
        f"<td class=n>{translations[i].score:.2f}"
        for i in range(0, len(text), step)[:SAMPLES]
    )
    return f"<table><tr><th>source<th>reference<th>translation<th class=n>score</tr>{rows}</table>"


def _matrices(network: TranslationNetwork) -> str:
    """A picture of every matrix A: row by row, how much a position reads of each other one."""
    sides = (("encoder", network.encoder), ("decoder", network.decoder))
    figures = []
    for side, blocks in sides:
        for number, layer in enumerate(_linear_layers(blocks)):
            matrix = _matrix(layer)
            name = f"{side}, layer {number + 1}"
            figures.append(
                f'<figure><img alt="{name}" src="{_picture(matrix)}"><figcaption>{name}</figcaption></figure>'
            )
    if not figures:
        return ""
    note = (
        "A row is a position that is computed, a column one that it reads, from the first to the last: red is "
        "positive, blue negative, white zero, each matrix by its largest value."
    )
    return f"<p>{note}</p><div class=photos>{''.join(figures)}</div>"


def _linear_layers(blocks: nn.Module) -> list[SequenceLinear]:
    return [module for module in blocks.modules() if isinstance(module, SequenceLinear)]


def _matrix(layer: SequenceLinear) -> np.ndarray:
    """A (positions, positions), the part that is used."""
    matrix = layer.weight[:_LARGEST_PICTURE, :_LARGEST_PICTURE]
    # A causal layer multiplies with the lower triangle only: what lies above it is never used nor trained.
    return (matrix.tril() if layer.causal else matrix).detach().float().cpu().numpy()


def _picture(matrix: np.ndarray) -> str:
    """A PNG as a data URL, with 4 x 4 pixels per entry."""
    relative = matrix / max(float(np.abs(matrix).max()), 1e-12)
    # White for 0; the colour grows as the other channels fade.
    faded = (255 * (1 - np.abs(relative))).astype(np.uint8)
    full = np.full_like(faded, 255)
    positive = relative >= 0
    pixels = np.stack([np.where(positive, full, faded), faded, np.where(positive, faded, full)], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(pixels.repeat(4, axis=0).repeat(4, axis=1)).save(buffer, "PNG")
    return data_url(buffer.getvalue(), "image/png")
