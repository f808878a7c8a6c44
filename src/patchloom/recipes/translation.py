"""Translation: thesis 4.3.5 (sequence-to-sequence ResMLP), after Ott et al. 2018, and the Transformer of Vaswani et al.

The thesis prints BLEU on WMT 2014 alone (Table 4.5). Small forms are for thousands of sentences on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from patchloom.errors import PatchloomError
from patchloom.recipes.cited import Cited, cite, derive
from patchloom.recipes.options import Options
from patchloom.recipes.recipe import Recipe

_THESIS = "thesis 4.3.5"
_VASWANI = "Vaswani et al. 2017"
_OTT = "Ott et al. 2018, whose set-up the thesis follows"
_SMALL = "ours, for small texts on a CPU"

MOST_BEAM = 1000  # hypotheses: each one costs as much as a translation
MOST_PENALTY = 10  # as an exponent of lengths, far above every useful value; powers by hundreds overflow


@dataclass(frozen=True, kw_only=True)
class TranslationOptions(Options):
    """Batches by tokens, vocabulary, regularisation, and how translations are searched for."""

    batch_tokens: int = 25_000  # of the longer side of a batch, padding included; in place of batch_size
    # tokens, at most, of both languages together; four of them have a meaning of their own, such as padding
    vocabulary: int = field(default=32_768, metadata={"least": 5, "most": 1 << 20})
    label_smoothing: float = 0.1
    dropout: float | None = None  # None: as the model says
    layerscale: float | None = None  # LayerScale's start; None: as the model says
    beam: int = field(default=4, metadata={"most": MOST_BEAM})
    length_penalty: float = 0.6  # the score of n tokens is log p / n^length_penalty

    TASK: ClassVar[str] = "translation"
    FRACTIONS: ClassVar[tuple[str, ...]] = ("label_smoothing", "dropout")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ("layerscale", "length_penalty")

    @property
    def batch_text(self) -> str:
        return f"{self.batch_tokens} tokens"

    def check(self, recipe: str) -> None:
        super().check(recipe)
        if self.label_smoothing == 1:
            raise PatchloomError(f"label_smoothing of {recipe} is below 1: at 1 no target is left.")
        if self.length_penalty > MOST_PENALTY:
            raise PatchloomError(f"length_penalty of {recipe} is at most {MOST_PENALTY}, not {self.length_penalty}.")


# what the thesis takes from Ott et al., and what its own text says of the evaluation
_COMMON: dict[str, Cited] = {
    "steps": (100_000, f"{_VASWANI}, 5.2: base model; the thesis gives none"),
    "batch_tokens": (25_000, f"{_VASWANI}, 5.1: about 25,000 tokens per side; the thesis gives none"),
    "seed": (0, "inferred"),
    "warmup_epochs": (0.0, "none: the warm-up is in steps"),
    "weight_decay": (0.0, f"{_OTT}: published command"),
    "clip_grad": (0.0, f"{_OTT}: published command"),
    "label_smoothing": (0.1, f"{_THESIS}; {_VASWANI}, 5.4"),
    "vocabulary": (32_768, f"{_OTT}: byte pairs of both languages together"),
    "beam": (4, f"{_THESIS}; {_OTT}"),
    "length_penalty": (0.6, f"{_OTT}; the thesis gives none. The score is log p / length^0.6"),
    "ema": (0.0, "inferred: none named"),
    "precision": ("float32", "inferred: none named"),
}

RESMLP_MT = cite(
    Recipe.of(TranslationOptions, name="resmlp_mt", summary="translation by ResMLP on WMT 2014"),
    **_COMMON,
    optimizer=("adagrad", _THESIS),
    lr=(0.2, _THESIS),
    eps=(1e-10, "inferred: torch's default for Adagrad"),
    schedule=("constant", "inferred: after the warm-up none is named, and Adagrad's own decay remains"),
    warmup_steps=(32_000, f"{_THESIS}: linear"),
    warmup_lr=(0.0, "inferred: linear from 0"),
    dropout=(0.15, f"{_THESIS}: 0.15 for English-German, 0.1 for English-French"),
    layerscale=(0.2, _THESIS),
)

TRANSFORMER_MT = cite(
    Recipe.of(TranslationOptions, name="transformer_mt", summary="translation by the Transformer on WMT 2014"),
    **_COMMON,
    optimizer=("adam", f"{_VASWANI}, 5.3"),
    lr=(7e-4, f"{_VASWANI}, 5.3: (d x warm-up)^-1/2 at d = 512 and 4,000 steps, the highest rate"),
    betas=((0.9, 0.98), f"{_VASWANI}, 5.3; {_OTT}"),
    eps=(1e-9, f"{_VASWANI}, 5.3"),
    schedule=("inverse_sqrt", f"{_VASWANI}, 5.3: lr (warm-up / step)^1/2"),
    warmup_steps=(4_000, f"{_VASWANI}, 5.3: linear"),
    warmup_lr=(1e-7, f"{_OTT}: published command"),
    dropout=(0.1, f"{_VASWANI}, 5.4: base model"),
)

# what changes for thousands instead of millions of sentences
_SMALL_CHANGES: dict[str, Cited] = {
    "steps": (None, f"{_SMALL}: epochs instead"),
    "epochs": (16, _SMALL),
    "batch_tokens": (1000, _SMALL),
    "vocabulary": (4000, _SMALL),
    "warmup_steps": (100, f"{_SMALL}: a run has hundreds of steps, not 100,000"),
    "dropout": (0.0, f"{_SMALL}: short runs do not overfit"),
}


def _small(recipe: Recipe, **cited: Cited) -> Recipe:
    summary = f"{recipe.name} adapted to small texts and a CPU"
    return derive(recipe, f"as {recipe.name}", f"{recipe.name}@small", summary, **_SMALL_CHANGES, **cited)


RESMLP_MT_SMALL = _small(RESMLP_MT)
TRANSFORMER_MT_SMALL = _small(
    TRANSFORMER_MT, lr=(2e-3, f"{_SMALL}: narrower networks take higher rates, as in {_VASWANI}, 5.3")
)

# target languages with a rate of their own
_DROPOUT_BY_TARGET: dict[str, Cited] = {"fr": (0.1, f"{_THESIS}: English-French")}


def for_target(recipe: Recipe, language: str) -> Recipe:
    """The recipe with the values that the thesis prints for a target language, where it prints some. A rate that is
    not the recipe's is the user's, and stays."""
    as_printed = recipe.name == RESMLP_MT.name and recipe.dropout == RESMLP_MT.dropout
    if as_printed and language in _DROPOUT_BY_TARGET:
        return cite(recipe, dropout=_DROPOUT_BY_TARGET[language])
    return recipe
