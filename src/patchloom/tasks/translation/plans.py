"""Plans of translation runs: names and settings resolved to a run config. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError, check_place, did_you_mean
from patchloom.models.registry import find_config, list_models
from patchloom.models.translation import TranslationConfig
from patchloom.recipes.changes import apply_changes, checked_options
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import choose_recipe
from patchloom.recipes.small import SUFFIX
from patchloom.recipes.translation import TranslationOptions, for_target
from patchloom.tasks.opened import Opened
from patchloom.tasks.registry import find_task
from patchloom.tasks.spec import RunConfig
from patchloom.tasks.translation.config import TranslationRunConfig
from patchloom.tasks.translation.text import Pair, parse_pair, read_parallel

Place = str | PathLike[str]
FEW_PAIRS = 1_000_000  # below, the default recipe is a small form


def plan_translation(
    data: Place,
    pair: str,
    model: str,
    recipe: str | Recipe | None = None,
    vocabulary: Place | None = None,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run on `data`; the arguments are those of `patchloom.translate`.

    Raises:
        PatchloomError: an unknown pair, model, recipe or setting, or a model of images.
    """
    check_place("data", data)
    check_place("model", model)
    options = checked_options(options or {})
    languages, config = parse_pair(pair), _text_config(model)
    notes: list[str] = []
    folder, opened = str(Path(data).absolute()), Opened()
    if recipe is None:
        recipe = _default_recipe(folder, languages, config, opened)
        notes.append(f"The recipe is {recipe}.")
    chosen = choose_recipe(recipe, TranslationOptions)
    if "batch_size" in (changes or {}):
        raise PatchloomError("Batches of translation are counted in tokens: set batch_tokens, not batch_size.")
    if "vocab_size" in options:
        wanted = options["vocab_size"]
        raise PatchloomError(f"The vocabulary decides vocab_size: set vocabulary={wanted}, or give --vocabulary FILE.")
    resolved, changed = apply_changes(for_target(chosen, languages[1]), changes or {})
    if resolved.shard != "none":  # generation calls parts of the network that only a whole network has in one place
        raise PatchloomError(
            f"shard={resolved.shard} cannot be used for translation: leave it out. Several processes then train with a "
            "copy of the network each."
        )
    if vocabulary is not None and "vocabulary" in (changes or {}):
        raise PatchloomError(
            f"vocabulary={resolved.vocabulary} is for one that is trained, and {vocabulary} is one: give one of them."
        )
    file = None if vocabulary is None else str(Path(vocabulary).absolute())
    task = TranslationRunConfig(folder, pair, config, options, file)
    network = task.network_config(resolved, config.vocab_size)  # refuses what cannot be built
    if "layerscale" in (changes or {}) and network.scale_value is None:
        raise PatchloomError(f"{model} has no LayerScale: leave out layerscale={resolved.layerscale}.")
    return RunConfig(find_task("translation"), task, resolved, (*notes, *changed), opened)


def _text_config(model: str) -> TranslationConfig:
    config: Any = find_config(model)
    if not isinstance(config, TranslationConfig):
        known = list_models(kind="text")
        raise PatchloomError(
            f"{model} is a network of images. Networks that translate: {', '.join(known)}.{did_you_mean(model, known)}"
        )
    return config


def _default_recipe(folder: str, pair: Pair, config: TranslationConfig, opened: Opened) -> str:
    """The recipe of the family, in its small form for few sentences."""
    return config.family + (SUFFIX if len(opened.keep(read_parallel, folder, "train", pair)) < FEW_PAIRS else "")
