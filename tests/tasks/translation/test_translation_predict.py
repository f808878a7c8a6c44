"""Translation of lines: in order, independent of each other, refused when empty or too long."""

from __future__ import annotations

import pytest
import torch

import patchloom
from conftest import stir
from patchloom import PatchloomError
from patchloom.tasks.translation import predict
from patchloom.tasks.translation.predict import decoding_options, translate_lines
from patchloom.tasks.translation.vocabulary import Vocabulary

LINES = ["a man rides a bike", "dogs", "two dogs run in the snow with a red ball", "a woman", "dogs run", "a red ball"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(LINES * 5, 80)


@pytest.fixture(scope="module")
def model(vocabulary: Vocabulary):
    torch.manual_seed(0)
    options = {"vocab_size": len(vocabulary), "dim": 32, "hidden": 64, "max_length": 24, "scale_value": 1.0}
    return stir(patchloom.create_model("resmlp_mt_nano", **options)).eval()


def test_lines_are_translated_in_order_and_alone_as_together(model, vocabulary, monkeypatch) -> None:
    options, done = decoding_options(vocabulary), []
    monkeypatch.setattr(predict, "BATCH_TOKENS", 24)  # several batches
    together = translate_lines(model, vocabulary, LINES, options, done.append)
    assert [each.source for each in together] == LINES
    assert len(done) > 1
    assert done[-1] == len(LINES)
    for line, each in zip(LINES, together, strict=True):
        (alone,) = translate_lines(model, vocabulary, [line], options)
        assert alone.translation == each.translation
        assert alone.score == pytest.approx(each.score, abs=1e-5)
    assert all("▁" not in each.translation and "⁇" not in each.translation for each in together)
    assert translate_lines(model, vocabulary, [], options) == []


def test_wide_beams_translate_fewer_sources_at_a_time(model, vocabulary, monkeypatch) -> None:
    monkeypatch.setattr(predict, "BATCH_TOKENS", 400)
    sizes, search = [], predict.search

    def counted(network, source, options):
        sizes.append(source.numel() * options.beam)
        return search(network, source, options)

    monkeypatch.setattr(predict, "search", counted)
    for beam in (4, 40):
        rows = translate_lines(model, vocabulary, LINES * 10, decoding_options(vocabulary, beam=beam))
        assert [row.source for row in rows] == LINES * 10
    # tokens of all hypotheses: as many as with the default beam, but at least one source of any length
    assert max(sizes) <= max(4 * 400, 40 * model.config.max_length)


def test_empty_and_long_lines_are_refused(model, vocabulary) -> None:
    options = decoding_options(vocabulary)
    with pytest.raises(PatchloomError, match="Line 2 is empty"):
        translate_lines(model, vocabulary, ["dogs", "  "], options)
    with pytest.raises(PatchloomError, match="The text is empty"):  # characters that leave no token
        translate_lines(model, vocabulary, ["\u200b\ufeff"], options)
    with pytest.raises(
        PatchloomError, match=r"The text, 'dogs dogs .* is too long: \d+ tokens, .* at most 24"
    ) as caught:
        translate_lines(model, vocabulary, [" ".join(["dogs"] * 3000)], options)
    assert len(str(caught.value)) < 300
