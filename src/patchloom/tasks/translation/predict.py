"""Translation of lines of text by a network and its vocabulary; evaluation and prediction both use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from patchloom.errors import PatchloomError
from patchloom.models.translation import TranslationNetwork
from patchloom.tasks.translation.batches import TokenPairs, batches_in_order
from patchloom.tasks.translation.decoding import DecodingOptions, search
from patchloom.tasks.translation.vocabulary import Vocabulary

BATCH_TOKENS = 4000  # of the sources that are translated together, padding included


@dataclass(frozen=True)
class Translation:
    """A source, its translation, and the score of the translation: log p / length^length_penalty."""

    source: str
    translation: str
    score: float


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
) -> list[Translation]:
    """The translation of each line, in order; `after_batch` is told how many are done.

    Lines of similar length are translated together, on the device of the network. Raises PatchloomError for empty
    lines and for lines longer than the network takes.
    """
    encoded = vocabulary.encode([line.strip() for line in lines])
    _check(model, lines, encoded)
    pairs = TokenPairs(encoded, encoded, vocabulary.bos)
    device = model.embedding.weight.device
    found: dict[int, Translation] = {}
    for places in batches_in_order(pairs.lengths, max(BATCH_TOKENS, model.config.max_length)):
        hypotheses = search(model, pairs.batch(places).source.to(device), options)
        texts = vocabulary.decode([hypothesis.tokens for hypothesis in hypotheses])
        for place, text, hypothesis in zip(places, texts, hypotheses, strict=True):
            found[place] = Translation(lines[place], text, hypothesis.score)
        after_batch(len(found))
    return [found[place] for place in range(len(lines))]


def _check(model: TranslationNetwork, lines: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
    longest = model.config.max_length
    for number, (line, tokens) in enumerate(zip(lines, encoded, strict=True), 1):
        where = f"Line {number}" if len(lines) > 1 else "The text"
        if not line.strip():
            raise PatchloomError(f"{where} is empty: there is nothing to translate.")
        if len(tokens) > longest:
            begin = line.strip()[:40]
            raise PatchloomError(
                f"{where}, {begin!r}..., is too long: {len(tokens)} tokens, and this {model.config.name} takes at most "
                f"{longest}. Split it into sentences."
            )
