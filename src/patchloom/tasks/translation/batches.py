"""Batches of sentence pairs by number of tokens. Which sentences a step sees is a function of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.randomness import seed_of
from patchloom.errors import PatchloomError
from patchloom.models.translation import PADDING
from patchloom.tasks.translation.text import ParallelText, describe_lines
from patchloom.tasks.translation.vocabulary import Vocabulary

# Narrow buckets waste less padding; wide ones mix more sentences with one another.
_LEAST_STEP, _RELATIVE_STEP = 2, 8  # from one bucket to the next: an eighth longer, at least two tokens


class Batch(NamedTuple):
    """Token ids, padded with 0: source (B, S), target (B, T) beginning with `bos`, and labels (B, T), the target
    shifted by one, ending with `eos`."""

    source: Tensor
    target: Tensor
    labels: Tensor


class TokenPairs:
    """Encoded sentence pairs: all tokens of a side in one array, so that millions of sentences fit."""

    def __init__(self, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], bos: int) -> None:
        self.bos = bos
        self._source, self._target = _Rows(source), _Rows(target)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def lengths(self) -> np.ndarray:
        """The longer side of each pair (pairs,), `eos` included."""
        return np.maximum(self._source.lengths, self._target.lengths)

    def batch(self, places: Sequence[int]) -> Batch:
        """The pairs at these places. No places give a batch without rows, one token wide."""
        source = _padded([self._source[place] for place in places])
        labels = _padded([self._target[place] for place in places])
        # Teacher forcing: at position t the decoder reads the labels before t, so the target is the labels moved right
        # by one.
        target = torch.cat([torch.full_like(labels[:, :1], self.bos), labels[:, :-1]], dim=1)
        # Where labels are padding the moved target still has the last `eos`: it becomes padding too.
        return Batch(source, target.masked_fill(labels == PADDING, PADDING), labels)


def encode_pairs(
    text: ParallelText, vocabulary: Vocabulary, max_length: int, leave_out: bool
) -> tuple[TokenPairs, ParallelText, list[str]]:
    """The tokens of parallel text, the text that they are of, and messages about what was left out.

    With `leave_out`, as for training, empty lines and sentences longer than `max_length` tokens are left out and
    reported. Otherwise, as for a test set whose score must count every line, they raise PatchloomError.
    """
    source, target = vocabulary.encode(text.source), vocabulary.encode(text.target)
    # Those of invisible characters alone, such as zero-width spaces, have no token but `eos` either.
    empty = {i for i, sides in enumerate(zip(source, target, strict=True)) if min(map(len, sides)) == 1}
    long = {i for i, sides in enumerate(zip(source, target, strict=True)) if max(map(len, sides)) > max_length}
    messages = []
    for places, what in ((empty, "empty"), (long - empty, f"longer than max_length, {max_length} tokens")):
        if places:
            messages.append(describe_lines(text, sorted(places), what))
    if messages and not leave_out:
        raise PatchloomError(f"{'; '.join(messages)}: correct them, or remove the pairs from both files.")
    kept = [i for i in range(len(text)) if i not in empty and i not in long]
    if not kept:
        raise PatchloomError(f"No usable sentence pair is left: {'; '.join(messages)}.")
    pairs = TokenPairs([source[i] for i in kept], [target[i] for i in kept], vocabulary.bos)
    return pairs, text if len(kept) == len(text) else text.keep(kept), [f"{message}: left out." for message in messages]


class TokenBatches:
    """Which pairs are in which batch: at most `batch_tokens` tokens on the longer side, padding included.

    Pairs of similar length share a bucket, and a batch takes its pairs from neighbouring buckets. Each epoch shuffles
    the pairs within the buckets, then the order of the batches; every pair comes once per epoch. Where one batch ends
    depends on the buckets alone, so all epochs have the same number of batches. Several processes divide each batch
    among them; together they see what one process would.

    Args:
        lengths: of each pair, its longer side in tokens, `eos` included (pairs,).
        batch_tokens: of one step, over all processes and accumulated parts.
        seed: decides the shuffling of every epoch.

    Raises:
        PatchloomError: a sentence is longer than `batch_tokens`, or no pairs are given.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, batch_tokens: int, seed: int = 0) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        if not len(lengths):
            raise PatchloomError("There are no sentence pairs to make batches of.")
        if lengths.max() > batch_tokens:
            raise PatchloomError(
                f"batch_tokens={batch_tokens} is less than the longest sentence, {lengths.max()} tokens: raise it."
            )
        self.batch_tokens, self.seed = batch_tokens, seed
        ceilings = _ceilings(int(lengths.max()))
        self._buckets = ceilings[np.searchsorted(ceilings, lengths)]  # the longest length in each pair's bucket
        self._ends = self._cut(np.sort(self._buckets))

    def _cut(self, buckets: np.ndarray) -> list[int]:
        """Where batches begin and end along pairs in order of their buckets."""
        # Every pair of a batch is counted as long as the bucket of its longest one, not as long as it is: then the cut
        # does not depend on how an epoch shuffles the pairs within buckets.
        ends, start = [0], 0
        for place, longest in enumerate(buckets.tolist()):
            if place > start and (place + 1 - start) * longest > self.batch_tokens:
                ends.append(place)
                start = place
        return [*ends, len(buckets)]

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches, the same in every epoch."""
        return len(self._ends) - 1

    def step(self, step: int, rank: int = 0, processes: int = 1) -> list[int]:
        """The places of the pairs that a process sees at a step. With fewer pairs than processes some see none."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[inside][rank::processes]

    def steps(self, start: int, end: int, rank: int = 0, processes: int = 1) -> Iterator[list[int]]:
        """`step` for the steps from `start` up to `end`."""
        for step in range(start, end):
            yield self.step(step, rank, processes)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, in order, as places of pairs."""
        return _epoch(self, epoch)

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng(seed_of(self.seed, epoch, "sentences"))
        shuffled = rng.permutation(len(self._buckets))
        # A stable sort keeps the shuffled order within a bucket.
        ordered = shuffled[np.argsort(self._buckets[shuffled], kind="stable")].tolist()
        batches = [ordered[start:end] for start, end in pairwise(self._ends)]
        return [batches[place] for place in rng.permutation(len(batches)).tolist()]


def batches_in_order(lengths: Sequence[int] | np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Batches for evaluation and prediction: places by length, longest first, each once."""
    # Longest first: if a batch does not fit into memory, the first one shows it. Also the least padding.
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    batches: list[list[int]] = []
    for place in order:
        if not batches or (len(batches[-1]) + 1) * int(lengths[batches[-1][0]]) > batch_tokens:
            batches.append([])
        batches[-1].append(place)
    return batches


@lru_cache(maxsize=2)  # consecutive steps ask for the same epoch
def _epoch(batches: TokenBatches, epoch: int) -> list[list[int]]:
    """The shuffled batches of an epoch, kept for the two epochs that were asked for last."""
    return batches._shuffled(epoch)


class _Rows:
    """Rows of token ids of different lengths in one array.

    Row i is tokens[ends[i] : ends[i + 1]]. A list of lists would take about ten times the memory.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        self._ends = np.concatenate([[0], np.cumsum(self.lengths)])
        # int32 takes half the memory of torch's int64 indices, which a batch is converted to.
        self._tokens = np.fromiter((token for row in rows for token in row), dtype=np.int32, count=self._ends[-1])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> np.ndarray:
        return self._tokens[self._ends[place] : self._ends[place + 1]]


def _padded(rows: Sequence[np.ndarray]) -> Tensor:
    """(B, longest) int64, padded with 0."""
    longest = max((len(row) for row in rows), default=1)
    out = torch.full((len(rows), longest), PADDING, dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return out


def _ceilings(longest: int) -> np.ndarray:
    """The longest length in each bucket, up to one that holds `longest`, which it does not exceed."""
    ceilings = [4]
    while ceilings[-1] < longest:
        ceilings.append(ceilings[-1] + max(_LEAST_STEP, ceilings[-1] // _RELATIVE_STEP))
    return np.minimum(np.array(ceilings), longest)
