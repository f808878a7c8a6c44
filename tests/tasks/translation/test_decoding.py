"""Greedy and beam search: equal with and without caches and to exhaustive search; independent of the batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from conftest import stirred_translator
from patchloom import PatchloomError
from patchloom.tasks.translation.decoding import DecodingOptions, beam_search, greedy_search, search

NANOS = ["resmlp_mt_nano", "transformer_mt_nano"]


def make(name: str, vocab_size: int = 23, seed: int = 0):
    return stirred_translator(name, seed, vocab_size=vocab_size, max_length=20)


def sources(count: int, longest: int = 9, vocab_size: int = 23) -> torch.Tensor:
    """Rows of different lengths, each ending with token 2."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(4, vocab_size, (count, longest), generator=generator)
    for i in range(count):
        length = 2 + i % (longest - 2)
        rows[i, length - 1] = 2
        rows[i, length:] = 0
    return rows


def options(**changes) -> DecodingOptions:
    return DecodingOptions(**{"bos": 1, "eos": 2, "forbidden": (3,), **changes})


def log_probability(model, source: torch.Tensor, tokens: tuple[int, ...]) -> float:
    target = torch.tensor([[1, *tokens]])
    with torch.no_grad():
        scores = model(source[None, source != 0], target)[0].log_softmax(-1)
    return sum(float(scores[i, token]) for i, token in enumerate((*tokens, 2)))


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_caches_change_no_token(name: str, beam: int) -> None:
    model, rows = make(name), sources(12)
    with_cache = search(model, rows, options(beam=beam))
    without = search(model, rows, options(beam=beam, cached=False))
    assert [each.tokens for each in with_cache] == [each.tokens for each in without]
    assert len({each.tokens for each in with_cache}) > 6
    for a, b in zip(with_cache, without, strict=True):
        assert a.score == pytest.approx(b.score, abs=1e-4)


@pytest.mark.parametrize("name", NANOS)
def test_a_beam_of_one_is_greedy(name: str) -> None:
    for seed in range(3):
        model, rows = make(name, seed=seed), sources(10)
        greedy = greedy_search(model, rows, options(beam=1))
        beams = beam_search(model, rows, options(beam=1))
        assert [each.tokens for each in greedy] == [found[0].tokens for found in beams]
        assert [each.score for each in greedy] == pytest.approx([found[0].score for found in beams], abs=1e-5)


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize(("limit", "width"), [(2, 1), (3, 2), (4, 3)])  # targets of one, two and three tokens
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
def test_a_beam_as_wide_as_all_prefixes_is_exhaustive_search(
    name: str, limit: int, width: int, length_penalty: float
) -> None:
    vocab_size = 6  # padding, bos, eos and three words
    model, rows = make(name, vocab_size), sources(5, vocab_size=vocab_size)
    chosen = options(
        beam=vocab_size**width, length_penalty=length_penalty, limit_factor=0.0, limit_extra=limit, forbidden=()
    )
    targets = [target for n in range(limit) for target in itertools.product((3, 4, 5), repeat=n)]
    for row, found in zip(rows, beam_search(model, rows, chosen), strict=True):
        every = {
            target: log_probability(model, row, target) / (len(target) + 1) ** length_penalty for target in targets
        }
        best = max(every, key=every.__getitem__)
        assert found[0].tokens == best
        assert found[0].score == pytest.approx(every[best], abs=1e-4)


@pytest.mark.parametrize("name", NANOS)
def test_scores_are_those_of_the_network_and_fall(name: str) -> None:
    model, rows = make(name), sources(6)
    for row, found in zip(rows, beam_search(model, rows, options(beam=5)), strict=True):
        assert len(found) <= 5
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
        assert len({each.tokens for each in found}) == len(found)
        for each in found:
            assert each.log_probability == pytest.approx(log_probability(model, row, each.tokens), abs=1e-4)
            assert each.score == pytest.approx(each.log_probability / (len(each.tokens) + 1) ** 0.6, abs=1e-6)
            assert not {0, 1, 2, 3} & set(each.tokens)


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_does_not_depend_on_its_batch(name: str, beam: int) -> None:
    model, rows = make(name), sources(9)
    together = search(model, rows, options(beam=beam))
    turned = search(model, rows.flip(0), options(beam=beam))[::-1]
    alone = [search(model, row[None, row != 0], options(beam=beam))[0] for row in rows]
    for a, b, c in zip(together, turned, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
        assert a.score == pytest.approx(b.score, abs=1e-5) == pytest.approx(c.score, abs=1e-5)


def test_a_wider_beam_finds_no_worse_translation_here() -> None:
    model, rows = make("resmlp_mt_nano"), sources(12)
    greedy = sum(each.log_probability for each in search(model, rows, options(beam=1, length_penalty=0.0)))
    wide = sum(each.log_probability for each in search(model, rows, options(beam=8, length_penalty=0.0)))
    assert wide >= greedy


def test_limits_keep_targets_within_the_network() -> None:
    model, rows = make("resmlp_mt_nano"), sources(8)
    for beam in (1, 4):
        found = search(model, rows, options(beam=beam, limit_factor=1.0, limit_extra=0))
        for row, each in zip(rows, found, strict=True):
            assert len(each.tokens) + 1 <= int((row != 0).sum())
        for each in search(model, rows, options(beam=beam, forbidden=(2, 3), limit_extra=500)):
            assert len(each.tokens) + 1 == model.config.max_length


def test_wrong_use_is_refused() -> None:
    model, rows = make("resmlp_mt_nano"), sources(2)
    with pytest.raises(PatchloomError, match="at least 1"):
        options(beam=0)
    with pytest.raises(PatchloomError, match="at most 1000 hypotheses, not 1001"):
        options(beam=1001)
    for penalty in (-1.0, 1000.0, float("nan"), float("inf")):
        with pytest.raises(PatchloomError, match=f"from 0 to 10, not {penalty}"):
            options(length_penalty=penalty)
    with pytest.raises(PatchloomError, match="evaluation mode"):
        search(model.train(), rows, options())


@pytest.mark.parametrize("beam", [1, 4])
def test_networks_with_nan_are_refused(beam: int) -> None:
    model, rows = make("resmlp_mt_nano"), sources(2)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with pytest.raises(PatchloomError, match="NaN"):
        search(model, rows, options(beam=beam))


def test_no_sources_give_no_translations() -> None:
    model = make("resmlp_mt_nano")
    for beam in (1, 3):
        assert search(model, torch.zeros(0, 4, dtype=torch.long), options(beam=beam)) == []


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize("beam", [1, 3])
def test_with_the_end_forbidden_every_translation_has_the_length_of_its_limit(name: str, beam: int) -> None:
    model, rows = make(name), sources(5)
    with torch.no_grad():  # a network that prefers to end
        model.decoder_norm.bias.add_(model.embedding.weight[2])
    for each in search(model, rows, options(beam=beam, forbidden=(2, 3), limit_factor=0.0, limit_extra=7)):
        assert len(each.tokens) == 6
        assert each.score > -100
    rows = sources(7)  # lengths 2 to 8: each has a limit of its own, which must not end the others
    found = search(model, rows, options(beam=beam, forbidden=(2, 3), limit_factor=1.0, limit_extra=0))
    assert [len(each.tokens) for each in found] == [1, 2, 3, 4, 5, 6, 7]
