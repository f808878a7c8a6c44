"""Generation of translations: greedy and beam search, for many sources at once.

Shapes: B sources that are not finished, K hypotheses of each, V tokens in the vocabulary. Every source has a limit of
its own, by its own length, so that a translation does not depend on the others in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.translation import PADDING, TranslationNetwork
from patchloom.recipes.translation import MOST_BEAM, MOST_PENALTY


@dataclass(frozen=True)
class DecodingOptions:
    """How translations are searched for. `beam` and `length_penalty` as in Ott et al. 2018."""

    bos: int  # the token that every target begins with
    eos: int  # the token that ends a target
    beam: int = 4
    length_penalty: float = 0.6  # a finished hypothesis of n tokens has the score log p / n^length_penalty
    # tokens that are never generated, beside padding and `bos`; `eos` among them comes at the limit only
    forbidden: tuple[int, ...] = ()
    limit_factor: float = 2.0  # a source of n tokens gets a target of at most limit_factor n + limit_extra
    limit_extra: int = 10
    cached: bool = True  # False computes the network on all tokens at every step, for comparison

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise PatchloomError(f"A beam has at least 1 hypothesis, not {self.beam}.")
        if self.beam > MOST_BEAM:
            raise PatchloomError(f"A beam has at most {MOST_BEAM} hypotheses, not {self.beam}.")
        if not 0 <= self.length_penalty <= MOST_PENALTY:
            raise PatchloomError(f"The length penalty is a number from 0 to {MOST_PENALTY}, not {self.length_penalty}.")


@dataclass(frozen=True)
class Hypothesis:
    """A translation: its tokens without the first and last special ones, its log-probability, and its score, which is
    the log-probability divided by a power of the length."""

    tokens: tuple[int, ...]
    log_probability: float
    score: float


class _Decoder(Protocol):
    """The network as a search uses it: one step for all hypotheses, and a choice of those that are continued."""

    def step(self, tokens: Tensor) -> Tensor:
        """The last tokens (B, K) -> logits (B, K, V) of the next ones."""
        ...

    def select(self, rows: Tensor, sources: Tensor | None) -> None: ...


class _CachedDecoder:
    """One token per step: the state holds what the earlier ones left."""

    def __init__(self, model: TranslationNetwork, source: Tensor) -> None:
        self.model = model
        self.state = model.start(model.encode(source))

    def step(self, tokens: Tensor) -> Tensor:
        return self.model.step(self.state, tokens)

    def select(self, rows: Tensor, sources: Tensor | None) -> None:
        self.state.select(rows, sources)


class _PlainDecoder:
    """The whole network on all tokens at every step: slow, and what the caches are tested against."""

    def __init__(self, model: TranslationNetwork, source: Tensor) -> None:
        self.model, self.source = model, source
        self.targets = source.new_empty(len(source), 0)

    def step(self, tokens: Tensor) -> Tensor:
        self.targets = torch.cat([self.targets, tokens.reshape(-1, 1)], dim=1)
        source = self.source.repeat_interleave(tokens.shape[1], dim=0)
        return self.model(source, self.targets)[:, -1].unflatten(0, tokens.shape)

    def select(self, rows: Tensor, sources: Tensor | None) -> None:
        self.targets = self.targets[rows]
        if sources is not None:
            self.source = self.source[sources]


def search(model: TranslationNetwork, source: Tensor, options: DecodingOptions) -> list[Hypothesis]:
    """The best translation of each source (B, S): greedy for a beam of 1, otherwise by beam search.

    Args:
        source: token ids (B, S), padded with 0, on the device of the model.

    Raises:
        PatchloomError: the model is in training mode, or its output is NaN.
    """
    if options.beam == 1:
        return greedy_search(model, source, options)
    return [found[0] for found in beam_search(model, source, options)]


@torch.inference_mode()
def greedy_search(model: TranslationNetwork, source: Tensor, options: DecodingOptions) -> list[Hypothesis]:
    """The most probable token at every step, for token ids (B, S), padded with 0.

    Returns:
        One hypothesis per source, in order. Much faster than a beam, hence used at each evaluation during training.

    Raises:
        PatchloomError: as `search`.
    """
    # Finished sources leave the batch at once: `active` has the places of the others, and shrinks.
    decoder, limits = _start(model, source, options)
    active = torch.arange(len(source), device=source.device)
    totals = torch.zeros(len(source), device=source.device)
    targets: list[list[int]] = [[] for _ in source]
    tokens = torch.full_like(active, options.bos)
    length = 0
    while len(active):
        length += 1
        scores = _next_scores(decoder.step(tokens[:, None]), limits[active] <= length, options)[:, 0]
        values, tokens = scores.max(dim=-1)
        totals[active] += values
        for place, token in zip(active.tolist(), tokens.tolist(), strict=True):
            targets[place].append(token)
        unfinished = (tokens != options.eos).nonzero().flatten()
        if len(unfinished) < len(active):
            decoder.select(unfinished, unfinished)
            active, tokens = active[unfinished], tokens[unfinished]
    if totals.isnan().any():
        raise _nan_error(model)
    return [_hypothesis(target[:-1], total, options) for target, total in zip(targets, totals.tolist(), strict=True)]


@torch.inference_mode()
def beam_search(model: TranslationNetwork, source: Tensor, options: DecodingOptions) -> list[list[Hypothesis]]:
    """Up to `beam` translations of each source (B, S), padded with 0, best first.

    A search ends with `beam` finished hypotheses, or when no unfinished one can reach the score of the best finished
    one. At the limit of its length a hypothesis ends with `eos`, at the cost of its probability.
    """
    beams = _Beams(model, source, options)
    while len(beams.active):
        beams.advance()
    if not all(beams.finished):
        raise _nan_error(model)
    return [sorted(found, key=lambda hypothesis: -hypothesis.score)[: options.beam] for found in beams.finished]


class _Beams:
    """The hypotheses of the sources that are not finished: tokens (B, K, steps) and log-probabilities (B, K)."""

    def __init__(self, model: TranslationNetwork, source: Tensor, options: DecodingOptions) -> None:
        self.options = options
        self.decoder, self.limits = _start(model, source, options)
        self.finished: list[list[Hypothesis]] = [[] for _ in source]
        self.active = torch.arange(len(source), device=source.device)  # the place of each of the B sources
        self.tokens = torch.full((len(source), 1, 1), options.bos, device=source.device)
        self.totals = torch.zeros(len(source), 1, device=source.device)
        self.length = 0  # tokens generated so far

    def advance(self) -> None:
        """Extend every hypothesis by a token, and keep the most probable ones of each source."""
        self.length += 1
        at_limit = self.limits[self.active] <= self.length
        scores = _next_scores(self.decoder.step(self.tokens[..., -1]), at_limit, self.options)
        width, vocabulary = scores.shape[1:]
        # The best of each hypothesis first: sums and a second search over whole vocabularies take longer.
        # (B, K V): the hypotheses of a source compete with one another, not those of different sources.
        best, ids = scores.topk(min(2 * self.options.beam, vocabulary))
        candidates = (self.totals[..., None] + best).flatten(1)
        # at most one candidate per hypothesis ends, so twice the beam always holds enough that do not
        totals, places = candidates.topk(min(2 * self.options.beam, candidates.shape[1]))
        parents, tokens = places // best.shape[-1], ids.flatten(1).gather(1, places)
        ends = tokens == self.options.eos
        self._finish(totals, parents, ends)
        # False sorts before True, and a stable sort keeps the order of scores: the best candidates that do not end.
        kept = ends.byte().argsort(dim=1, stable=True)[:, : min(self.options.beam, width * (vocabulary - 1))]
        totals, parents, tokens = (part.gather(1, kept) for part in (totals, parents, tokens))
        self._continue(totals, parents, tokens, self._unfinished(totals[:, 0], at_limit))

    def _finish(self, totals: Tensor, parents: Tensor, ends: Tensor) -> None:
        """Note the hypotheses that end among the best `beam` candidates."""
        beam = self.options.beam
        # Only among the best `beam`: an end with a low probability is not taken just because the others are not
        # finished. Forbidden tokens have probability 0 and are not finite.
        for row, column in (ends[:, :beam] & totals[:, :beam].isfinite()).nonzero().tolist():
            target = self.tokens[row, parents[row, column], 1:].tolist()
            found = self.finished[int(self.active[row])]
            found.append(_hypothesis(target, float(totals[row, column]), self.options))

    def _unfinished(self, best: Tensor, at_limit: Tensor) -> Tensor:
        """The rows whose search continues, given their most probable unfinished hypothesis (B,)."""
        # log-probabilities only fall, so none can score higher than if the longest target had this one
        bounds = best / self.limits[self.active].to(best.dtype) ** self.options.length_penalty
        rows = []
        for row, (place, bound, last) in enumerate(
            zip(self.active.tolist(), bounds.tolist(), at_limit.tolist(), strict=True)
        ):
            found = self.finished[place]
            enough = len(found) >= self.options.beam or (found and max(each.score for each in found) >= bound)
            if not (enough or last):
                rows.append(row)
        return torch.tensor(rows, dtype=torch.int64, device=best.device)

    def _continue(self, totals: Tensor, parents: Tensor, tokens: Tensor, rows: Tensor) -> None:
        width = self.tokens.shape[1]
        sources = None if len(rows) == len(self.active) else rows
        totals, parents, tokens = totals[rows], parents[rows], tokens[rows]
        # Hypotheses lie flat in the caches: hypothesis k of row b is at b K + k.
        chosen = (rows[:, None] * width + parents).flatten()
        unchanged = sources is None and torch.equal(chosen, torch.arange(len(rows) * width, device=chosen.device))
        # Moving the caches of all layers costs time, and is not needed while every hypothesis continues itself.
        if not unchanged:
            self.decoder.select(chosen, sources)
        history = self.tokens.flatten(0, 1)[chosen].unflatten(0, parents.shape)
        self.tokens = torch.cat([history, tokens[..., None]], dim=-1)
        self.totals, self.active = totals, self.active[rows]


def _start(model: TranslationNetwork, source: Tensor, options: DecodingOptions) -> tuple[_Decoder, Tensor]:
    """The decoder, and the largest number of tokens of each target (B,), `eos` among them."""
    if model.training:
        raise PatchloomError("Translations are generated in evaluation mode: call model.eval() first.")
    lengths = (source != PADDING).sum(dim=1)
    limits = (lengths * options.limit_factor).long() + options.limit_extra
    decoder = (_CachedDecoder if options.cached else _PlainDecoder)(model, source)
    return decoder, limits.clamp(1, model.config.max_length)


def _next_scores(logits: Tensor, at_limit: Tensor, options: DecodingOptions) -> Tensor:
    """Log-probabilities (B, K, V) of the next tokens; -inf for those that may not come. At its limit only `eos` may."""
    # In float32: half precision would round the sum of many log-probabilities.
    scores = logits.float().log_softmax(dim=-1)
    end = scores[..., options.eos].clone()
    for token in (PADDING, options.bos, *options.forbidden):
        scores[..., token] = -torch.inf
    if bool(at_limit.any()):
        # Only `eos` keeps its probability, so that a cut translation pays for ending there.
        scores[at_limit] = -torch.inf
        # Not of the other sources: there `eos` may be forbidden.
        scores[..., options.eos] = torch.where(at_limit[:, None], end, scores[..., options.eos])
    return scores


def _nan_error(model: TranslationNetwork) -> PatchloomError:
    return PatchloomError(f"The output of this {model.config.name} is NaN: it cannot translate.")


def _hypothesis(target: list[int], log_probability: float, options: DecodingOptions) -> Hypothesis:
    length = len(target) + 1  # with `eos`
    return Hypothesis(tuple(target), log_probability, log_probability / length**options.length_penalty)
