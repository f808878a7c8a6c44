"""What a recipe makes of a model: its config with drop rates, dropout and scales, and what the recipe then records."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.config import Config, PatchConfig
from patchloom.recipes.changes import value_text
from patchloom.recipes.recipe import Recipe


def network_config(config: Config, recipe: Recipe, num_classes: int, options: Mapping[str, Any]) -> Config:
    """A model's config as the recipe trains it: size, stochastic depth, dropout and scales, then the user's options.

    A family without a choice (ResMLP always has LayerScale, and the same drop rate in every block) keeps its own.
    """
    own: dict[str, Any] = {"num_classes": num_classes}
    fields = {field.name for field in dataclasses.fields(config)}
    for name in ("drop_path", "drop_path_decay", "dropout"):
        if getattr(recipe, name) is not None and name in fields:
            own[name] = getattr(recipe, name)
    if "scale" in fields:
        own |= _scale(config, recipe, options)
    elif recipe.layerscale is not None and "scale_value" in fields:
        own["scale_value"] = recipe.layerscale
    if recipe.resolution is not None:
        own["img_size"] = (recipe.resolution, recipe.resolution)
        if isinstance(config, PatchConfig):
            own["patch_size"] = options.get("patch_size", config.patch_size)
    return config.replace(**{**own, **options})


def _scale(config: Any, recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of a ViT's branches and its start. Only what starts at LayerScale's value takes it from the recipe."""
    scale = options.get("scale", recipe.scale or config.scale)
    if scale in ("layerscale", "epsilon"):
        value = config.scale_value if recipe.layerscale is None else recipe.layerscale
        return {"scale": scale, "scale_value": value if scale == config.scale else recipe.layerscale}
    return {"scale": scale} if scale == config.scale else {"scale": scale, "scale_value": None}


def as_built(
    recipe: Recipe, network: Config, explicit: Collection[str], trained: bool, scales_from: str | None = None
) -> Recipe:
    """The recipe with what the network has of it, so that a run records what it trains.

    explicit      the fields that the user set: one that the network does not take is refused
    trained       the network starts from weights, which hold its scales
    scales_from   the weights whose scales it starts from
    """
    start = getattr(network, "scale_start", None)
    of_timm = not isinstance(network, PatchConfig) or network.family == "convnet"
    decay = None if of_timm else "uniform"  # timm has its own way to distribute drop_path
    has = {
        "drop_path": getattr(network, "drop_path", 0.0),
        "drop_path_decay": getattr(network, "drop_path_decay", decay),
        "dropout": getattr(network, "dropout", 0.0),
        "scale": getattr(network, "scale", "none" if start is None else "layerscale"),
        "layerscale": None if trained or scales_from else start,
    }
    if recipe.resolution is not None:  # model.img_size decides; None for an image that is not square
        has["resolution"] = network.img_size[0] if len(set(network.img_size)) == 1 else None
    changed = {name: value for name, value in has.items() if value != getattr(recipe, name)}
    for name in changed:
        if name in explicit and getattr(recipe, name) is not None:
            why = f"it has {value_text(has[name])}"
            if name == "layerscale" and scales_from:
                why = f"its scales start as those of {scales_from}"
            elif trained and "scale" in name:
                why = "its weights hold their scales"
            raise PatchloomError(f"{name}={value_text(getattr(recipe, name))} cannot be set for {network.name}: {why}.")
    sources = {name: f"{network.name}; {recipe.name} has {value_text(getattr(recipe, name))}" for name in changed}
    if scales_from:
        sources["layerscale"] = f"the scales of {scales_from}"
    return dataclasses.replace(recipe.replace(**changed), sources={**recipe.sources, **sources})


def keep_scales(recipe: Recipe) -> Recipe:
    """The recipe for weights that are trained already: their scales stay what they are."""
    return recipe.replace(scale=None, layerscale=None)
