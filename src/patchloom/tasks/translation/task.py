"""Learning to translate: batches of sentence pairs by tokens, cross-entropy per token, BLEU of greedy translations."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.models.network import evaluation_mode
from patchloom.models.translation import PADDING, TranslationNetwork
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.translation.batches import TokenBatches, TokenPairs, batches_in_order
from patchloom.tasks.translation.config import TranslationRunConfig
from patchloom.tasks.translation.decoding import search
from patchloom.tasks.translation.finish import finish
from patchloom.tasks.translation.losses import token_loss
from patchloom.tasks.translation.metrics import bleu
from patchloom.tasks.translation.predict import BATCH_TOKENS, decoding_options
from patchloom.tasks.translation.text import ParallelText
from patchloom.tasks.translation.vocabulary import Vocabulary
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.task import Metric, Result, Task

MODEL = "model"  # the one module of the task
BLEU = Metric("greedy_bleu")
DECODED = 500  # held-out sentences that are translated at each evaluation

TextBatch = tuple[Tensor, Tensor, Tensor]  # source (B, S), target (B, T) and labels (B, T)


@dataclass(frozen=True)
class Corpus:
    """Encoded sentence pairs to learn from, those held out with their text, and what was left out."""

    train: TokenPairs
    held_out: TokenPairs
    held_out_text: ParallelText
    fingerprint: str
    left_out: tuple[str, ...] = ()


class Translation(Task):
    """Sentence pairs in, logits of the next target token compared with it."""

    metric = BLEU
    unit = "tokens"

    def __init__(
        self,
        config: TranslationRunConfig,
        network: TranslationNetwork,
        vocabulary: Vocabulary,
        corpus: Corpus,
        recipe: Recipe,
        processes: Processes,
        console: Console,
    ) -> None:
        self.config, self.network, self.vocabulary, self.corpus = config, network, vocabulary, corpus
        self.recipe, self.processes, self.console = recipe, processes, console
        self.modules = nn.ModuleDict({MODEL: network})
        self.order = TokenBatches(corpus.train.lengths, recipe.batch_tokens, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        # A fixed sample, the same in every run on this data, so that runs can be compared.
        self._decoded = sorted(random.Random(0).sample(range(len(corpus.held_out)), min(DECODED, len(corpus.held_out))))

    def batches(self, start: int, end: int) -> Generator[TextBatch, None, None]:
        """The encoded pairs of each step, those of this process: see `TokenBatches`."""
        for places in self.order.steps(start, end, self.processes.rank, self.processes.count):
            yield tuple(self.corpus.train.batch(places))  # type: ignore[misc]

    def weight(self, batch: TextBatch) -> float:
        """The number of target tokens, padding left out: losses are means per token, not per sentence."""
        return float((batch[2] != PADDING).sum())

    def losses(self, batch: TextBatch, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        """{"loss": the sum over all target tokens}, with the recipe's label smoothing."""
        source, target, labels = batch
        logits = self.modules[MODEL](source, target)
        return {"loss": token_loss(logits, labels, self.recipe.label_smoothing)[0]}

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """The mean loss of a token without smoothing, and the BLEU of greedy translations of up to 500 sentences."""
        network: Any = modules[MODEL]
        with evaluation_mode(network):
            loss = self.held_out_loss(network, after_batch)
            translations = self._greedy(network, after_batch)
        references = [self.corpus.held_out_text.target[place] for place in self._decoded]
        return {"count": len(self.corpus.held_out), "loss": loss, "greedy_bleu": bleu(translations, references)}

    @torch.no_grad()
    def held_out_loss(self, network: TranslationNetwork, after_batch: Callable[[], None] = lambda: None) -> float:
        """Over all processes; each has a share of every batch, so that all have equally many."""
        return mean_loss(network, self.corpus.held_out, self.processes, after_batch)

    def _greedy(self, network: TranslationNetwork, after_batch: Callable[[], None]) -> list[str]:
        """The translations of the decoded sentences, in order, over all processes."""
        pairs, places = self.corpus.held_out, self._decoded
        options = decoding_options(self.vocabulary, beam=1)
        found: dict[int, str] = {}
        # Each process translates its share of every batch, so that all call `after_batch` equally often.
        for batch in batches_in_order(pairs.lengths[places], max(BATCH_TOKENS, network.config.max_length)):
            mine = [places[i] for i in batch][self.processes.rank :: self.processes.count]
            if mine:
                source = pairs.batch(mine).source.to(self.processes.device)
                texts = self.vocabulary.decode([hypothesis.tokens for hypothesis in search(network, source, options)])
                found |= dict(zip(mine, texts, strict=True))
            after_batch()
        for share in self.processes.gather(found):
            found |= share
        return [found[place] for place in places]

    def metadata(self) -> dict[str, Any]:
        return self.network.metadata()

    def environment(self) -> dict[str, Any]:
        """Enough of the data to notice a change, and the vocabulary, so that a resumed run has the same."""
        data = {
            "where": self.config.data,
            "fingerprint": self.corpus.fingerprint,
            "pairs": len(self.corpus.train),
            "held_out": len(self.corpus.held_out),
            "left_out": list(self.corpus.left_out),
        }
        return {"data": data, "vocabulary": self.vocabulary.to_text()}

    def finish(self, run: Run, result: Result) -> None:
        finish(self, run, result)


@torch.no_grad()
def mean_loss(
    network: TranslationNetwork,
    pairs: TokenPairs,
    processes: Processes,
    after_batch: Callable[[], None] = lambda: None,
) -> float:
    """The mean cross-entropy of a target token over all processes.

    Without label smoothing, so that it can be compared between recipes; exp of it is the perplexity.
    """
    total, tokens = 0.0, 0.0
    for places in batches_in_order(pairs.lengths, max(BATCH_TOKENS, network.config.max_length)):
        mine = places[processes.rank :: processes.count]
        if mine:
            source, target, labels = (tensor.to(processes.device) for tensor in pairs.batch(mine))
            loss, count = token_loss(network(source, target), labels)
            total, tokens = total + float(loss), tokens + float(count)
        after_batch()
    return processes.total(total) / processes.total(tokens)
