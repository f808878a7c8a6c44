"""BLEU and chrF by sacrebleu, with the signatures that make them comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.install import needed

_COMPOUNDS = ("de",)  # languages whose hyphenated words Ott et al. 2018 split for tokenised BLEU


def translation_metrics(translations: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Metrics of plain text, from 0 to 100, with the signatures of sacrebleu.

    `bleu` and `chrf` compare detokenised text as sacrebleu does by default; report `bleu`. `bleu_tokenized` is the BLEU
    of Moses tokens, the kind that the thesis prints (Table 4.5); never compare the two with each other.
    """
    if len(translations) != len(references):
        raise PatchloomError(f"There are {len(translations)} translations for {len(references)} references.")
    if not references:
        raise PatchloomError("BLEU needs at least one translation and its reference.")
    metric_classes = _sacrebleu()
    tokenize = moses_tokenizer(language)
    texts = {
        "bleu": (metric_classes.BLEU(), list(translations), list(references)),
        "chrf": (metric_classes.CHRF(), list(translations), list(references)),
        "bleu_tokenized": (
            # "none": the text is tokenised already; force silences sacrebleu's warning about that.
            metric_classes.BLEU(tokenize="none", force=True),
            tokenize(translations),
            tokenize(references),
        ),
    }
    metrics: dict[str, Any] = {}
    signatures = {}
    for name, (metric, ours, theirs) in texts.items():
        metrics[name] = metric.corpus_score(ours, [theirs]).score
        signatures[name] = str(metric.get_signature())
    return {**metrics, "signatures": signatures}


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of detokenised text as sacrebleu computes it by default, from 0 to 100."""
    return _sacrebleu().BLEU().corpus_score(list(translations), [list(references)]).score


def _sacrebleu() -> Any:
    with needed("BLEU needs sacrebleu", "translation"):
        from sacrebleu import metrics
    return metrics


def moses_tokenizer(language: str) -> Any:
    """A function from lines to lines of Moses tokens, separated by spaces; German compounds are split at hyphens."""
    with needed("Tokenised BLEU needs sacremoses", "translation"):
        from sacremoses import MosesTokenizer
    tokenizer = MosesTokenizer(lang=language)

    def tokenize(lines: Sequence[str]) -> list[str]:
        # escape=False keeps & and quotes as they are; Moses would write HTML entities for them.
        split = language in _COMPOUNDS
        return [tokenizer.tokenize(line, aggressive_dash_splits=split, return_str=True, escape=False) for line in lines]

    return tokenize
