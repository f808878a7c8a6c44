"""Metrics of a model that translates, on parallel text."""

from __future__ import annotations

import os
from typing import Any

from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.models.translation import TranslationNetwork
from patchloom.tasks.translation.batches import encode_pairs
from patchloom.tasks.translation.metrics import translation_metrics
from patchloom.tasks.translation.predict import open_translator, search_options, translate_lines
from patchloom.tasks.translation.task import mean_loss
from patchloom.tasks.translation.text import held_out_stem, read_parallel
from patchloom.training.processes import Processes

Model = TranslationNetwork | str | os.PathLike[str]


def evaluate(
    model: Model,
    data: str | os.PathLike[str],
    *,
    split: str | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """BLEU, chrF and the loss of a token on a split of parallel text, any file stem; by default val, else test.

    `beam` and `length_penalty` are by default those of the model's recipe. Every line counts: an empty or too long one
    raises PatchloomError.
    """
    network, vocabulary = open_translator(model, device)
    if network.pair is None:
        raise PatchloomError(f"{network.config.name} does not say which languages it translates.")
    stem = held_out_stem(data, network.pair) if split is None else split
    text = read_parallel(data, stem, network.pair)
    pairs, _, _ = encode_pairs(text, vocabulary, network.config.max_length, leave_out=False)
    options = search_options(network, vocabulary, beam, length_penalty)
    rows = translate_lines(network, vocabulary, text.source, options)
    return {
        "split": text.stem,
        "pair": "-".join(network.pair),
        "count": len(text),
        **translation_metrics([row.translation for row in rows], text.target, network.pair[1]),
        "loss": mean_loss(network, pairs, Processes(device=network.embedding.weight.device)),
        "beam": options.beam,
        "length_penalty": options.length_penalty,
    }
