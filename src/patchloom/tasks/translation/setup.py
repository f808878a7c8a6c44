"""A translation task from its config: parallel text, vocabulary and network."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

from patchloom.data.randomness import seed_of
from patchloom.errors import PatchloomError
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.spec import Context
from patchloom.tasks.translation.batches import encode_pairs
from patchloom.tasks.translation.config import TranslationRunConfig
from patchloom.tasks.translation.task import Corpus, Translation
from patchloom.tasks.translation.text import ParallelText, held_out_stem, read_parallel
from patchloom.tasks.translation.vocabulary import Vocabulary


def open_task(config: TranslationRunConfig, recipe: Recipe, context: Context) -> Translation:
    """Read the text, train or read the vocabulary, encode, and build the network with the seed of the recipe."""
    pair = config.languages
    train = context.opened.take(read_parallel, config.data, "train", pair)
    held_out = read_parallel(config.data, held_out_stem(config.data, pair), pair)
    fingerprint = _fingerprint(train, held_out)
    known = dict(context.environment or {})
    if known and known["data"].get("fingerprint") != fingerprint:
        raise PatchloomError(f"The text in {config.data} has changed since the run began: resuming needs the same.")
    vocabulary = _vocabulary(config, recipe, train, known)
    model: Any = config.network_config(recipe, len(vocabulary))
    corpus = _encode(train, held_out, vocabulary, model.max_length, fingerprint, context)
    torch.manual_seed(seed_of(recipe.seed, "init"))
    network: Any = build(model)
    network.describe_text(vocabulary.model, pair, recipe.beam, recipe.length_penalty)
    config = dataclasses.replace(config, model=config.model.replace(vocab_size=len(vocabulary)))
    return Translation(config, network, vocabulary, corpus, recipe, context.processes, context.console)


def _vocabulary(config: TranslationRunConfig, recipe: Recipe, train: ParallelText, known: dict[str, Any]) -> Vocabulary:
    """That of a resumed run, of a file, or one that is trained on the training split."""
    # Training it again would give the same bytes only with the same version of sentencepiece.
    if "vocabulary" in known:
        return Vocabulary.from_text(known["vocabulary"])
    if config.vocabulary_file is not None:
        return Vocabulary.read(config.vocabulary_file)
    # One vocabulary for both languages: names and numbers get the same tokens on both sides.
    lines = [line for side in (train.source, train.target) for line in side if line]
    if not lines:
        raise PatchloomError(f"All lines of {train.stem} in {config.data} are empty.")
    return Vocabulary.train(lines, recipe.vocabulary)


def _encode(
    train: ParallelText,
    held_out: ParallelText,
    vocabulary: Vocabulary,
    max_length: int,
    fingerprint: str,
    context: Context,
) -> Corpus:
    pairs, _, messages = encode_pairs(train, vocabulary, max_length, leave_out=not context.strict)
    held_pairs, held_text, more = encode_pairs(held_out, vocabulary, max_length, leave_out=not context.strict)
    context.console.say(*messages, *more)
    return Corpus(pairs, held_pairs, held_text, fingerprint, (*messages, *more))


def _fingerprint(*texts: ParallelText) -> str:
    """SHA-256 of all sentences."""
    whole = hashlib.sha256()
    for text in texts:
        for lines in (text.source, text.target):
            # The NUL byte between two sides cannot be in a line, so that moving a line changes the digest.
            whole.update("\n".join(lines).encode() + b"\0")
    return whole.hexdigest()
