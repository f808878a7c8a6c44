"""Subword vocabularies of sentencepiece, shared by both languages, as bytes that travel with the weights."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.install import needed
from patchloom.models.translation import PADDING
from patchloom.reading import read_file

_MOST_BYTES = 1 << 28
_LONGEST_LINE = 1 << 20  # bytes; sentencepiece would leave out longer ones silently


class Vocabulary:
    """Text to token ids and back. Id 0 is padding.

    `model` is a sentencepiece model with pieces for the beginning and the end of a sentence. Where it has no piece for
    padding, as by sentencepiece's default, all its ids are moved up by one.
    """

    def __init__(self, model: bytes, name: str = "The vocabulary") -> None:
        self.model = model
        try:
            processor = _sentencepiece().SentencePieceProcessor()
            processor.LoadFromSerializedProto(model)
        except (RuntimeError, TypeError) as error:
            raise PatchloomError(f"{name} is not a model of sentencepiece.") from error
        self._processor = processor
        # Networks mask id 0, so it must be padding and never a piece of text.
        self._offset = 1 if processor.pad_id() < 0 else 0
        if processor.pad_id() > 0:
            raise PatchloomError(
                f"{name} has padding at id {processor.pad_id()}: train it with pad_id=0, or without padding."
            )
        if min(processor.bos_id(), processor.eos_id()) < 0:
            raise PatchloomError(f"{name} has no piece for the beginning or the end of a sentence: train it with both.")

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> Vocabulary:
        """A byte-pair vocabulary of at most `size` tokens from lines of both languages; the same lines and size give
        the same bytes. A small text gives fewer tokens."""
        trainer, written = _sentencepiece().SentencePieceTrainer, io.BytesIO()
        try:
            trainer.train(
                sentence_iterator=iter(lines),
                model_writer=written,
                model_type="bpe",
                vocab_size=size,
                # A small text has fewer distinct pieces than asked for: it gets a smaller vocabulary.
                hard_vocab_limit=False,
                character_coverage=1.0,
                max_sentence_length=_LONGEST_LINE,
                # Fixed ids, so that `bos` and `eos` do not depend on the text.
                pad_id=PADDING,
                bos_id=1,
                eos_id=2,
                unk_id=3,
                # Several threads may count in another order and give other pieces.
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            # Its own advice names options that there are none of here.
            if few := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
                reason = f"its distinct characters alone need {few[1]}. Set a larger vocabulary."
            raise PatchloomError(f"A vocabulary of {size} tokens cannot be trained on this text: {reason}") from error
        return cls(written.getvalue())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """The vocabulary in a file of sentencepiece (.model)."""
        try:
            return cls(read_file(path, _MOST_BYTES), os.fspath(path))
        except OSError as error:
            raise PatchloomError(f"Cannot read {path}: {error.strerror or error}.") from error

    @classmethod
    def from_text(cls, text: str) -> Vocabulary:
        """The inverse of `to_text`."""
        return cls(base64.b64decode(text))

    def to_text(self) -> str:
        """The bytes of the model in base64, to be stored in JSON."""
        return base64.b64encode(self.model).decode()

    def __len__(self) -> int:
        return len(self._processor) + self._offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and other.model == self.model

    def __hash__(self) -> int:
        return hash(self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes get the model's bytes: the processor of sentencepiece is not shared."""
        return Vocabulary, (self.model,)

    @cached_property
    def bos(self) -> int:
        """The token that begins every target."""
        return self._processor.bos_id() + self._offset

    @cached_property
    def eos(self) -> int:
        """The token that ends every sentence."""
        return self._processor.eos_id() + self._offset

    @cached_property
    def unknown(self) -> int:
        """The token of characters that the vocabulary does not have."""
        return self._processor.unk_id() + self._offset

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Token ids of each line, with `eos` at the end."""
        encoded = self._processor.encode(list(lines), out_type=int)
        return [[*(token + self._offset for token in tokens), self.eos] for tokens in encoded]

    def decode(self, lines: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of token ids; padding, `bos` and `eos` are left out."""
        special = {PADDING, self.bos, self.eos}
        kept = [[token - self._offset for token in tokens if token not in special] for tokens in lines]
        return [self._processor.decode(tokens) for tokens in kept]


def _sentencepiece() -> Any:
    with needed("Translation needs sentencepiece", "translation"):
        import sentencepiece
    return sentencepiece
