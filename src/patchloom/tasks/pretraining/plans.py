"""Plans of pre-training runs: names, settings and weights resolved to a run config. Nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

from patchloom.data.sources import Source
from patchloom.data.splits import Splits
from patchloom.errors import PatchloomError, check_place, did_you_mean
from patchloom.models.config import Config, PatchConfig
from patchloom.recipes.changes import apply_changes, checked_options
from patchloom.recipes.cited import cite
from patchloom.recipes.networks import as_built, keep_scales
from patchloom.recipes.pretraining import PretrainingOptions, methods_of
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import choose_recipe
from patchloom.recipes.small import SUFFIX
from patchloom.tasks.classification.config import absolute_place
from patchloom.tasks.classification.defaults import median_side, sized_recipe
from patchloom.tasks.opened import Opened
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.images import open_any
from patchloom.tasks.pretraining.method import find_method
from patchloom.tasks.pretraining.sequence import with_tokenizer_first
from patchloom.tasks.pretraining.tokenizers import TrainedTokenizer, find_tokenizer
from patchloom.tasks.registry import find_task
from patchloom.tasks.retrieval.plans import open_trunk
from patchloom.tasks.spec import RunConfig

Place = str | PathLike[str]
METHODS = ("dino", "beit", "mae")  # of --method


def plan_pretraining(
    data: Place,
    model: Place,
    method: str,
    recipe: str | Recipe | None = None,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    tokenizer: Place | None = None,
    labels: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    splits: Splits | None = None,
) -> RunConfig:
    """A run on `data`; the arguments are those of `patchloom.pretrain`. The list of images and weights are read."""
    check_method(method)
    places = {"data": data, "model": model} | ({} if tokenizer is None else {"tokenizer": tokenizer})
    for name, place in places.items():
        check_place(name, place)
    changes, options = dict(changes or {}), checked_options(options or {})
    config = PretrainingConfig(absolute_place(data), labels, Config(), splits=splits or Splits())
    opened = Opened()
    source = open_any(config, opened, keep=True)
    trunk, start, own, notes = open_trunk(model, source, options, opened, mean, std)
    if trunk.kind != "image":
        raise PatchloomError(f"{trunk.name} is a network of {trunk.kind}, and pre-training is for images.")
    if recipe is None:
        recipe, note = sized_recipe(method, source)
        notes.append(note)
    resolved, consequences = _resolve_recipe(recipe, trunk, own, changes, start is not None)
    _check_settings(method, resolved, changes)
    trained, resolved = _tokenizer(tokenizer, method, resolved, changes)
    config = dataclasses.replace(config, model=trunk, model_options=own, start=start, tokenizer=trained)
    built = config.trunk_config(resolved)  # refuses what cannot be built
    resolved = as_built(resolved, built, changes, start is not None)
    _check_size(source, built)
    find_method(resolved.method).check(config, resolved, built)
    run = RunConfig(find_task("pretraining"), config, resolved, (*notes, *consequences), opened)
    return with_tokenizer_first(run) if method == "beit" and trained is None else run


def _tokenizer(
    place: Place | None, method: str, recipe: Recipe, changes: Mapping[str, Any]
) -> tuple[TrainedTokenizer | None, Recipe]:
    """The trained tokenizer that is asked for, and the recipe with what it decides."""
    if place is None:
        return None, recipe
    if method != "beit":
        raise PatchloomError(f"--tokenizer is for --method beit, which predicts codes; {method} has none.")
    for name in changes:
        if "tokenizer" in (methods_of(name) or ()):
            raise PatchloomError(f"{name} is a setting of the tokenizer, and --tokenizer {place} is trained already.")
    found = find_tokenizer(absolute_place(place))
    has = {
        "codes": found.config.codes,
        "code_dim": found.config.code_dim,
        "tokenizer_dim": found.config.dim,
        "tokenizer_depth": found.config.depth,
        "tokenizer_patch": found.config.patch_size,
        "tokenizer_standardise": found.config.standardise,
    }
    return found, cite(recipe, **{name: (value, f"of {found.weights}") for name, value in has.items()})


def check_method(method: Any) -> None:
    """Refuse anything but the name of a method."""
    if method not in METHODS:
        hint = did_you_mean(str(method), METHODS)
        raise PatchloomError(f"Unknown value {method!r} for --method. Choose from: {', '.join(METHODS)}.{hint}")


def _resolve_recipe(
    recipe: str | Recipe, trunk: Config, options: Mapping[str, Any], changes: Mapping[str, Any], trained: bool
) -> tuple[Recipe, list[str]]:
    """The recipe for a trunk, with changes; `trained`: the trunk has weights, whose scales stay what they are."""
    deciding = ("dim", "depth", "branches", "patch_size")
    given = {name: options[name] for name in deciding if name in options}
    if isinstance(trunk, PatchConfig) and isinstance(patch := given.get("patch_size"), int):
        given["img_size"] = tuple(side * patch for side in trunk.grid)  # as many patches
    sized = trunk.replace(**given)
    chosen = choose_recipe(recipe, PretrainingOptions, sized)
    if chosen.resolution is not None and trunk.img_size[0] < 224 and "resolution" not in changes:
        chosen = chosen.replace(resolution=None)  # a model for small images keeps its size
    return apply_changes(keep_scales(chosen) if trained else chosen, changes, sized)


def _check_settings(method: str, recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Refuse a recipe of another method, and settings that the method does not read."""
    if recipe.method != method:
        raise PatchloomError(
            f"{recipe.name} is a recipe for --method {recipe.method}, not for {method}: give --recipe {method} or "
            f"{method}{SUFFIX}, or leave it out."
        )
    for name in changes:
        if (methods := methods_of(name)) is not None and method not in methods:
            raise PatchloomError(f"{name} is a setting of {' and '.join(methods)}: --method {method} does not read it.")


def _check_size(source: Source, trunk: Config) -> None:
    """Refuse images that are smaller than what the network sees: enlarged, they have nothing to crop."""
    side, needed = median_side(source), min(trunk.img_size)
    if side < needed:
        raise PatchloomError(
            f"The images of {source.where} are too small: their shorter sides are {side:g} pixels (median), and the "
            f"crops of {trunk.name} are {trunk.img_size[0]} x {trunk.img_size[1]}. Set img_size to at most {side:g}."
        )
