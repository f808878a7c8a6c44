"""The procedures of translation as values with their sources, until they become recipes.

Each value stands beside where it comes from. "inferred" marks what no source states.
"""

from __future__ import annotations

from typing import Any

Cited = tuple[Any, str]

_THESIS = "thesis 4.3.5"
_VASWANI = "Vaswani et al. 2017"
_OTT = "Ott et al. 2018, whose set-up the thesis follows"
_SMALL = "ours, for small texts on a CPU"

# Shared by both: what the thesis takes from Ott et al. and what its own text says of the evaluation.
_COMMON: dict[str, Cited] = {
    "label_smoothing": (0.1, f"{_THESIS}; {_VASWANI}, 5.4"),
    "vocabulary": (32768, f"{_OTT}: byte pairs of both languages together"),
    "beam": (4, f"{_THESIS}; {_OTT}"),
    "length_penalty": (0.6, f"{_OTT}; the thesis gives none. The score is log p / length^0.6"),
    "batch_tokens": (25000, f"{_VASWANI}, 5.1: about 25,000 tokens per side; the thesis gives none"),
    "steps": (100_000, f"{_VASWANI}, 5.2: base model; the thesis gives none"),
    "weight_decay": (0.0, f"{_OTT}: published command"),
    "clip_grad": (0.0, f"{_OTT}: published command"),
    "ema": (0.0, "inferred: none named"),
    "precision": ("float32", "inferred: none named"),
    "seed": (0, "inferred"),
}

RESMLP_MT: dict[str, Cited] = {
    **_COMMON,
    "optimizer": ("adagrad", _THESIS),
    "lr": (0.2, _THESIS),
    "eps": (1e-10, "inferred: torch's default for Adagrad"),
    "initial_accumulator": (0.0, "inferred: torch's default for Adagrad"),
    "schedule": ("constant", "inferred: after the warm-up none is named, and Adagrad's own decay remains"),
    "warmup_steps": (32_000, f"{_THESIS}: linear"),
    "warmup_lr": (0.0, "inferred: linear from 0"),
    "dropout": (0.15, f"{_THESIS}: 0.15 for English-German; 0.1 for English-French"),
    "layerscale": (0.2, _THESIS),
}
# the target language that has a rate of its own; every other one has the recipe's
DROPOUT_BY_TARGET: dict[str, Cited] = {"fr": (0.1, f"{_THESIS}: English-French")}

TRANSFORMER_MT: dict[str, Cited] = {
    **_COMMON,
    "optimizer": ("adam", f"{_VASWANI}, 5.3"),
    "lr": (7e-4, f"{_VASWANI}, 5.3: (d x warm-up)^-1/2 at d = 512 and 4,000 steps, the highest rate"),
    "betas": ((0.9, 0.98), f"{_VASWANI}, 5.3; {_OTT}"),
    "eps": (1e-9, f"{_VASWANI}, 5.3"),
    "schedule": ("inverse_sqrt", f"{_VASWANI}, 5.3: lr (warm-up / step)^1/2"),
    "warmup_steps": (4_000, f"{_VASWANI}, 5.3: linear"),
    "warmup_lr": (1e-7, f"{_OTT}: published command"),
    "dropout": (0.1, f"{_VASWANI}, 5.4: base model"),
}

# What changes for thousands instead of millions of sentences; everything else as above.
_SMALL_CHANGES: dict[str, Cited] = {
    "epochs": (16, _SMALL),
    "batch_tokens": (1000, _SMALL),
    "vocabulary": (4000, _SMALL),
}
RESMLP_MT_SMALL: dict[str, Cited] = {
    **{key: value for key, value in RESMLP_MT.items() if key != "steps"},
    **_SMALL_CHANGES,
    "warmup_steps": (100, f"{_SMALL}: a run has hundreds of steps, not 100,000"),
    "dropout": (0.0, f"{_SMALL}: short runs do not overfit"),
}
TRANSFORMER_MT_SMALL: dict[str, Cited] = {
    **{key: value for key, value in TRANSFORMER_MT.items() if key != "steps"},
    **_SMALL_CHANGES,
    "lr": (2e-3, f"{_SMALL}: narrower networks take higher rates, as in {_VASWANI}, 5.3"),
    "warmup_steps": (100, f"{_SMALL}: a run has hundreds of steps, not 100,000"),
    "dropout": (0.0, f"{_SMALL}: short runs do not overfit"),
}

RECIPES: dict[str, dict[str, Cited]] = {
    "resmlp_mt": RESMLP_MT,
    "transformer_mt": TRANSFORMER_MT,
    "resmlp_mt@small": RESMLP_MT_SMALL,
    "transformer_mt@small": TRANSFORMER_MT_SMALL,
}


def learning_rate(recipe: dict[str, Cited], step: int) -> float:
    """The rate of update `step`, from 0 on: linear warm-up, then constant or falling with the inverse square root."""
    lr, warmup, start = recipe["lr"][0], recipe["warmup_steps"][0], recipe["warmup_lr"][0]
    if step < warmup:
        return start + (lr - start) * (step + 1) / warmup
    return lr if recipe["schedule"][0] == "constant" else lr * (warmup / (step + 1)) ** 0.5
