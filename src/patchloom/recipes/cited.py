"""Helpers to write recipes: values with their sources, and recipes derived from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from patchloom.models.config import PatchConfig
from patchloom.recipes.recipe import Recipe

Cited = tuple[Any, str]  # a value and where it comes from
Size = tuple[int, int]  # width and depth of a network
Row = TypeVar("Row")

# The meaning of "LAMB" in the published commands, the same in every paper.
LAMB: dict[str, Cited] = {
    "optimizer": ("lamb", "LAMB"),
    "lr_scaling": ("none", "published code: rates of LAMB are given at their batch and never scaled"),
    "eps": (1e-8, "published code: passed to every optimizer, so LAMB has it in place of its own 1e-6"),
    "clip_grad": (1.0, "published code: LAMB clips the global norm at 1.0 by itself (thesis Table 6.1); no other clip"),
}


def cite(base: Recipe, **cited: Cited) -> Recipe:
    """A copy of `base` with other values, each given with its source."""
    values = {name: value for name, (value, _) in cited.items()}
    sources = {**base.sources, **{name: source for name, (_, source) in cited.items()}}
    return dataclasses.replace(base.replace(**values), sources=sources)


def derive(base: Recipe, relation: str, name: str, summary: str, **cited: Cited) -> Recipe:
    """A new recipe with the values of `base` except those given; `relation` says why the others are inherited."""
    inherited = {
        field: text if text.startswith(("as ", "inferred")) else f"{relation}: {text}"
        for field, text in base.sources.items()
    }
    return cite(dataclasses.replace(base, name=name, summary=summary, sources=inherited), **cited)


def lamb(where: str) -> dict[str, Cited]:
    """The fields of LAMB as published, for a paper that mentions it at `where`."""
    return {**LAMB, "optimizer": ("lamb", where)}


def size_of(model: PatchConfig) -> Size:
    """Width, and the total number of pairs of attention (or mixing) and FFN: P parallel branches count as P blocks."""
    return model.dim, model.depth * getattr(model, "branches", 1)


def for_patches(model: PatchConfig | None, rate: Cited) -> Cited:
    """The drop rate of a table by width and depth, which applies to patch networks; convnets get none."""
    if model is None or model.family != "convnet":
        return rate
    return 0.0, f"inferred for {model.name}: none, as rates by width and depth are for patch networks"


def nearest(rows: Mapping[Size, Row], model: PatchConfig) -> tuple[Row, str]:
    """The row of a paper's table for a model, and a remark if the model is not listed.

    For an unlisted model: the row nearest in width, and among those the nearest in depth.
    """
    width, depth = own = size_of(model)
    size = min(rows, key=lambda size: (abs(size[0] - width), abs(size[1] - depth), size))
    listed = size == own
    return rows[size], "" if listed else f"; inferred for {model.name}: the nearest listed width, then depth"


def nearest_depth(rows: Mapping[int, Row], depth: int) -> tuple[Row, str]:
    """The row of a paper's table by depth, and a remark if the table does not list this depth."""
    listed = min(rows, key=lambda known: (abs(known - depth), known))
    return rows[listed], "" if listed == depth else f"; inferred for {depth} blocks: the nearest listed depth"
