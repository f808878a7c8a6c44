"""How recipes are written down: each value beside its source, and one recipe derived from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from patchloom.models.config import PatchConfig
from patchloom.recipes.recipe import Recipe

Cited = tuple[Any, str]  # a value and where it comes from
Size = tuple[int, int]  # width and depth of a network
Row = TypeVar("Row")

# What "LAMB" means in the published commands, whichever paper asks for it.
LAMB: dict[str, Cited] = {
    "optimizer": ("lamb", "LAMB"),
    "lr_scaling": ("none", "published code: rates of LAMB are given at their batch and never scaled"),
    "eps": (1e-8, "published code: passed to every optimizer, so LAMB has it in place of its own 1e-6"),
    "clip_grad": (1.0, "published code: LAMB clips the global norm at 1.0 by itself (thesis Table 6.1); no other clip"),
}


def cite(base: Recipe, **cited: Cited) -> Recipe:
    """`base` with other values, each given with its source."""
    values = {name: value for name, (value, _) in cited.items()}
    sources = {**base.sources, **{name: source for name, (_, source) in cited.items()}}
    return dataclasses.replace(base.replace(**values), sources=sources)


def derive(base: Recipe, relation: str, name: str, summary: str, **cited: Cited) -> Recipe:
    """A recipe of its own: the values of `base` except those given. `relation` says why the others are inherited."""
    inherited = {
        field: text if text.startswith(("as ", "inferred")) else f"{relation}: {text}"
        for field, text in base.sources.items()
    }
    return cite(dataclasses.replace(base, name=name, summary=summary, sources=inherited), **cited)


def lamb(where: str) -> dict[str, Cited]:
    """LAMB as published, for a paper that names it at `where`."""
    return {**LAMB, "optimizer": ("lamb", where)}


def size_of(model: PatchConfig) -> Size:
    """Width, and pairs of attention (or mixing) and FFN in all: P branches side by side count as P in a row."""
    return model.dim, model.depth * getattr(model, "branches", 1)


def for_patches(model: PatchConfig | None, rate: Cited) -> Cited:
    """A drop rate by width and depth is for patch networks: a convnet with other widths has none."""
    if model is None or model.family != "convnet":
        return rate
    return 0.0, f"inferred for {model.name}: none, as rates by width and depth are for patch networks"


def nearest(rows: Mapping[Size, Row], model: PatchConfig) -> tuple[Row, str]:
    """The row of a paper's table for a model, and a remark where the model is not listed.

    The rule for an unlisted model: the row nearest in width, and among those of that width the nearest in depth.
    """
    width, depth = own = size_of(model)
    size = min(rows, key=lambda size: (abs(size[0] - width), abs(size[1] - depth), size))
    listed = size == own
    return rows[size], "" if listed else f"; inferred for {model.name}: the nearest listed width, then depth"
