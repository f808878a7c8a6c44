"""Translation of lines of text by a network and its vocabulary; evaluation and prediction both use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError
from patchloom.models.translation import TranslationNetwork
from patchloom.tasks.translation.batches import TokenPairs, batches_in_order
from patchloom.tasks.translation.decoding import DecodingOptions, search
from patchloom.tasks.translation.vocabulary import Vocabulary
from patchloom.weights.load import load

_LONGEST_NAME = 4096  # characters of a path
BATCH_TOKENS = 4000  # of the sources that are translated together, padding included
_BEAM = 4  # hypotheses of each source in such a batch; wider beams take fewer sources at a time


@dataclass(frozen=True)
class Translated:
    """A source, its translation, and the score of the translation: log p / length^length_penalty."""

    source: str
    translation: str
    score: float


def open_translator(model: Any, device: Device = "auto") -> tuple[TranslationNetwork, Vocabulary]:
    """A network with its vocabulary, in eval mode: of a run folder, an export or a file, or one that is loaded."""
    chosen = choose_device(device)
    network: Any = load(model) if isinstance(model, str | os.PathLike) else model
    if not isinstance(network, TranslationNetwork):
        raise PatchloomError(f"{model} is not a model that translates.")
    if network.vocabulary is None:
        raise PatchloomError(f"{model} has no vocabulary in it: take the export of a run.")
    return network.to(chosen).eval(), Vocabulary(network.vocabulary, "The vocabulary of the model")


def search_options(
    network: TranslationNetwork, vocabulary: Vocabulary, beam: int | None, length_penalty: float | None
) -> DecodingOptions:
    """The options of the model's recipe, or others."""
    penalty = network.length_penalty if length_penalty is None else length_penalty
    return decoding_options(vocabulary, network.beam if beam is None else beam, penalty)


def predict(
    model: Any,
    inputs: str | Sequence[str],
    *,
    beam: int | None = None,
    length_penalty: float | None = None,
    device: Device = "auto",
) -> list[dict[str, Any]]:
    """{source, translation, score} for each sentence, in order; decoded as `evaluate` decodes.

    Raises:
        PatchloomError: not a model that translates, nothing to translate, an empty or too long line, or a file's name.
    """
    lines = [inputs] if isinstance(inputs, str) else list(inputs)
    if not lines:
        raise PatchloomError("There is nothing to translate: give sentences, or --file FILE.")
    for line in lines:
        _check_text(line)
    return predict_lines(model, lines, beam=beam, length_penalty=length_penalty, device=device)


def predict_lines(
    model: Any,
    lines: Sequence[str],
    *,
    beam: int | None = None,
    length_penalty: float | None = None,
    device: Device = "auto",
) -> list[dict[str, Any]]:
    """As `predict`, for the lines of a text: a line is a sentence even if a file has such a name."""
    network, vocabulary = open_translator(model, device)
    options = search_options(network, vocabulary, beam, length_penalty)
    return [asdict(row) for row in translate_lines(network, vocabulary, lines, options)]


def _check_text(line: Any) -> None:
    """Refuse what is not a sentence: other objects, broken characters, and the name of a file or folder."""
    if not isinstance(line, str):
        raise PatchloomError(f"This model translates text, not {type(line).__name__}.")
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise PatchloomError(f"{line[:40]!a} is not valid Unicode: give sentences in UTF-8.") from error
    if len(line) < _LONGEST_NAME and line.strip() and _names_file(line):
        kind = "folder" if Path(line).is_dir() else "file"
        raise PatchloomError(f"{line} is a {kind}, and this model translates sentences: --file takes a text file.")


def decoding_options(vocabulary: Vocabulary, beam: int = 4, length_penalty: float = 0.6) -> DecodingOptions:
    """The options that `evaluate` and `predict` share; characters that are unknown are never generated."""
    return DecodingOptions(
        vocabulary.bos, vocabulary.eos, beam=beam, length_penalty=length_penalty, forbidden=(vocabulary.unknown,)
    )


def translate_lines(
    model: TranslationNetwork,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    options: DecodingOptions,
    after_batch: Callable[[int], None] = lambda _: None,
) -> list[Translated]:
    """The translation of each line, in order; `after_batch` gets the number of finished lines.

    Lines of similar length are translated together, on the device of the network. Raises PatchloomError for empty
    lines and for lines longer than the network takes.
    """
    encoded = vocabulary.encode([line.strip() for line in lines])
    _check(model, lines, encoded)
    # Without a target, the source stands in for it, so that lengths and batches are those of the source.
    pairs = TokenPairs(encoded, encoded, vocabulary.bos)
    device = model.embedding.weight.device
    found: dict[int, Translated] = {}
    # Memory grows with sources times hypotheses.
    batch_tokens = BATCH_TOKENS * _BEAM // max(_BEAM, options.beam)
    for places in batches_in_order(pairs.lengths, max(batch_tokens, model.config.max_length)):
        hypotheses = search(model, pairs.batch(places).source.to(device), options)
        texts = vocabulary.decode([hypothesis.tokens for hypothesis in hypotheses])
        for place, text, hypothesis in zip(places, texts, hypotheses, strict=True):
            # Batches are in order of length; places bring the translations back into the order of the lines.
            found[place] = Translated(lines[place], text, hypothesis.score)
        after_batch(len(found))
    return [found[place] for place in range(len(lines))]


def _check(model: TranslationNetwork, lines: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
    longest = model.config.max_length
    for number, (line, tokens) in enumerate(zip(lines, encoded, strict=True), 1):
        where = f"Line {number}" if len(lines) > 1 else "The text"
        if len(tokens) == 1:  # `eos` alone: a line without characters, or of invisible ones only
            raise PatchloomError(f"{where} is empty: there is nothing to translate.")
        if len(tokens) > longest:
            begin = line.strip()[:40]
            raise PatchloomError(
                f"{where}, {begin!r}..., is too long: {len(tokens)} tokens, and this {model.config.name} takes at most "
                f"{longest}. Split it into sentences."
            )


def _names_file(line: str) -> bool:
    try:
        return Path(line).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False
