"""BLEU and chrF: those of sacrebleu, with signatures."""

from __future__ import annotations

import pytest
import sacrebleu

from patchloom import PatchloomError
from patchloom.tasks.translation.metrics import translation_metrics

REFERENCES = ["Ein Mann fährt mit dem Rad-Taxi.", "Zwei Hunde laufen über die Wiese.", "Er sagt: „Nein!“"]
TRANSLATIONS = ["Ein Mann fährt mit einem Rad-Taxi.", "Zwei Hunde laufen auf der Wiese.", "Er sagt: „Ja!“"]


def test_metrics_are_those_of_sacrebleu() -> None:
    metrics = translation_metrics(TRANSLATIONS, REFERENCES, "de")
    assert metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score)
    assert metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score)
    assert "tok:13a" in metrics["signatures"]["bleu"]
    assert metrics["signatures"]["chrf"].startswith("nrefs:1")


def test_tokenised_bleu_counts_moses_tokens() -> None:
    metrics = translation_metrics(TRANSLATIONS, REFERENCES, "de")
    spaced = [
        [line.replace("-", " - ").replace(".", " .").replace(":", " :") for line in lines]
        for lines in (TRANSLATIONS, REFERENCES)
    ]
    spaced = [[line.replace("„", "„ ").replace("!“", " ! “") for line in lines] for lines in spaced]
    expected = sacrebleu.corpus_bleu(spaced[0], [spaced[1]], tokenize="none", force=True).score
    assert metrics["bleu_tokenized"] == pytest.approx(expected)
    assert metrics["bleu_tokenized"] != pytest.approx(metrics["bleu"])
    assert "tok:none" in metrics["signatures"]["bleu_tokenized"]


def test_perfect_translations_reach_100() -> None:
    metrics = translation_metrics(REFERENCES, REFERENCES, "fr")
    assert [metrics[name] for name in ("bleu", "chrf", "bleu_tokenized")] == pytest.approx([100, 100, 100])


def test_counts_must_agree() -> None:
    with pytest.raises(PatchloomError, match="2 translations for 3 references"):
        translation_metrics(TRANSLATIONS[:2], REFERENCES, "de")
    with pytest.raises(PatchloomError, match="at least one"):
        translation_metrics([], [], "de")
