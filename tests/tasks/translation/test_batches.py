"""Batches by tokens: within the budget, every pair once per epoch, a function of seed and step, the same for any
number of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import patchloom
from conftest import assert_close, stir
from patchloom import PatchloomError
from patchloom.tasks.translation.batches import TokenBatches, TokenPairs, batches_in_order, encode_pairs
from patchloom.tasks.translation.losses import token_loss
from patchloom.tasks.translation.text import ParallelText
from patchloom.tasks.translation.vocabulary import Vocabulary

LENGTHS = np.random.default_rng(0).geometric(0.08, 500).clip(2, 60)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=200),
    st.integers(70, 400),
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
)
def test_every_pair_comes_once_per_epoch_within_the_budget(lengths, budget: int, seed: int, epoch: int) -> None:
    batches = TokenBatches(lengths, budget, seed)
    of_epoch = batches.epoch(epoch)
    assert len(of_epoch) == batches.steps_per_epoch
    assert sorted(place for batch in of_epoch for place in batch) == list(range(len(lengths)))
    for batch in of_epoch:
        assert 0 < len(batch) * max(lengths[place] for place in batch) <= budget


def test_a_step_is_a_function_of_the_seed_and_the_step() -> None:
    batches = TokenBatches(LENGTHS, 300, seed=7)
    steps = list(batches.steps(0, 3 * batches.steps_per_epoch))
    again = TokenBatches(LENGTHS, 300, seed=7)
    for step in (77, 0, 40, 3 * batches.steps_per_epoch - 1):
        assert again.step(step) == steps[step]
    first, second = steps[: batches.steps_per_epoch], steps[batches.steps_per_epoch : 2 * batches.steps_per_epoch]
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    assert TokenBatches(LENGTHS, 300, seed=8).step(0) != steps[0]


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_processes_divide_what_one_would_see(processes: int) -> None:
    batches = TokenBatches(LENGTHS, 300, seed=1)
    for step in range(batches.steps_per_epoch):
        shares = [batches.step(step, rank, processes) for rank in range(processes)]
        assert sorted(place for share in shares for place in share) == sorted(batches.step(step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_hold_little_padding() -> None:
    batches = TokenBatches(LENGTHS, 600).epoch(0)
    padded = sum(len(batch) * max(LENGTHS[batch]) for batch in batches)
    assert LENGTHS.sum() / padded > 0.85
    assert padded / len(batches) > 0.75 * 600  # and most batches are full
    shuffled = np.random.default_rng(0).permutation(500).reshape(20, 25)
    assert LENGTHS.sum() / sum(25 * max(LENGTHS[batch]) for batch in shuffled) < 0.4  # what random batches would have


def test_budgets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PatchloomError, match="batch_tokens=50 is less than the longest sentence, 60"):
        TokenBatches([3, 60], 50)
    with pytest.raises(PatchloomError, match="no sentence pairs"):
        TokenBatches([], 50)


def test_targets_begin_with_bos_and_labels_end_with_eos() -> None:
    pairs = TokenPairs([[5, 6, 2], [7, 2]], [[8, 2], [9, 10, 11, 2]], bos=1)
    assert pairs.lengths.tolist() == [3, 4]
    batch = pairs.batch([1, 0])
    assert batch.source.tolist() == [[7, 2, 0], [5, 6, 2]]
    assert batch.target.tolist() == [[1, 9, 10, 11], [1, 8, 0, 0]]
    assert batch.labels.tolist() == [[9, 10, 11, 2], [8, 2, 0, 0]]
    empty = pairs.batch([])
    assert [part.shape for part in empty] == [(0, 1)] * 3


def test_evaluation_batches_hold_every_line_once() -> None:
    batches = batches_in_order(LENGTHS, 300)
    assert sorted(place for batch in batches for place in batch) == list(range(500))
    assert all(len(batch) * LENGTHS[batch].max() <= 300 for batch in batches)


def test_unusable_lines_are_left_out_aloud_or_refused() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    lines = tuple(" ".join(words[: 1 + i % 5]) for i in range(20))
    vocabulary = Vocabulary.train(lines, 60)
    source = (lines[0], "", *lines[2:19], " ".join(words * 40))
    text = ParallelText(Path(), "train", ("en", "de"), source, lines)
    pairs, kept, messages = encode_pairs(text, vocabulary, 12, leave_out=True)
    assert len(pairs) == len(kept) == 18
    assert kept.target == (lines[0], *lines[2:19])
    assert messages == [
        "1 line of train.en or train.de is empty (line 2): left out.",
        "1 line of train.en or train.de is longer than max_length, 12 tokens (line 20): left out.",
    ]
    with pytest.raises(PatchloomError, match=r"empty \(line 2\); .*longer than max_length, 12 tokens \(line 20\)"):
        encode_pairs(text, vocabulary, 12, leave_out=False)
    with pytest.raises(PatchloomError, match="No usable sentence pair"):
        encode_pairs(text, vocabulary, 1, leave_out=True)


def test_lines_of_invisible_characters_are_empty() -> None:
    lines = ("alpha beta", "gamma delta", "alpha gamma", "beta")
    vocabulary = Vocabulary.train(lines, 30)
    text = ParallelText(Path(), "val", ("en", "de"), ("alpha", "\u200b", "beta", "gamma"), ("a", "b", "\x07", "\ufeff"))
    pairs, kept, messages = encode_pairs(text, vocabulary, 12, leave_out=True)
    assert len(pairs) == 1
    assert kept.source == ("alpha",)
    assert messages == ["3 lines of val.en or val.de are empty (lines 2, 3, 4): left out."]


def test_the_loss_weighs_every_token_alike_however_a_batch_is_divided() -> None:
    torch.manual_seed(0)
    model = stir(patchloom.create_model("resmlp_mt_nano", vocab_size=30, dim=16, hidden=32, depth=1))
    generator = np.random.default_rng(0)
    rows = [[[*generator.integers(4, 30, n), 2] for n in generator.integers(1, 9, 10)] for _ in range(2)]
    pairs = TokenPairs(*rows, bos=1)

    def gradients(shares):
        model.zero_grad()
        losses = [token_loss(model(*batch[:2]), batch.labels, 0.1) for batch in map(pairs.batch, shares)]
        count = sum(tokens for _, tokens in losses)
        (sum(total for total, _ in losses) / count).backward()
        return count, [parameter.grad.clone() for parameter in model.parameters()]

    count, whole = gradients([list(range(10))])
    assert count == sum(map(len, rows[1]))
    _, divided = gradients([[0, 3, 6, 9], [1, 4, 7], [2, 5, 8], []])
    for ours, theirs in zip(divided, whole, strict=True):
        assert_close(ours, theirs, 1e-5)
