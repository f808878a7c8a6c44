"""`key=value` changes of a recipe, from words or from Python values."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config
from patchloom.recipes.recipe import Recipe

_ALIASES = {"img_size": "resolution"}


def parse_words(words: Iterable[str], extra: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of the recipe, and of the model (`model.depth=2`), from `key=value` words; the last of a key wins.
    `extra` keys have one number a colour, or one for all (`mean=0.5`)."""
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    hints = get_type_hints(Recipe)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise PatchloomError(f"{word!r} is no key=value.")
        if key.startswith("model."):
            options[key.removeprefix("model.")] = _guess(value)
            continue
        if key in extra:
            changes[key] = _colours(key, value)
            continue
        name = _ALIASES.get(key, key)
        known = {*(field.name for field in dataclasses.fields(Recipe)), *_ALIASES} - {"sources", "name", "summary"}
        known |= set(extra)
        if key not in known and name not in known:
            raise PatchloomError(
                f"There is no setting {key!r}.{did_you_mean(key, known)} Settings are fields of a recipe."
            )
        changes[name] = _parse(key, value, hints[name])
    return changes, options


def apply_changes(recipe: Recipe, changes: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe with changes, and sentences on what follows from them.

    Where the recipe scales its rate with the batch and only the batch is changed, the rate follows. A warm-up as long
    as the whole run shrinks with the epochs.
    """
    named = {_ALIASES.get(key, key): value for key, value in changes.items()}
    changed, notes = recipe.replace(**named), []
    said = {name: f"set for this run; {recipe.name} has {getattr(recipe, name)}" for name in named}
    changed = dataclasses.replace(changed, sources={**recipe.sources, **said})
    if recipe.lr_scaling == "linear" and "lr" not in named and changed.batch_size != recipe.batch_size:
        changed = changed.replace(lr=recipe.lr * changed.batch_size / recipe.batch_size)
        notes.append(f"lr {changed.lr:.3g}: {recipe.lr:.3g} at batch {recipe.batch_size}, scaled with the batch.")
    if "warmup_epochs" not in named and changed.warmup_epochs >= changed.epochs:
        changed = changed.replace(warmup_epochs=changed.epochs * recipe.warmup_epochs / max(recipe.epochs, 1))
        notes.append(f"warm-up of {changed.warmup_epochs:.2g} epochs, as its share of the recipe's {recipe.epochs}.")
    return changed, notes


def network_config(config: Config, recipe: Recipe, num_classes: int, options: Mapping[str, Any]) -> Config:
    """A model's config as the recipe trains it: its size, stochastic depth and LayerScale, then the user's options."""
    own: dict[str, Any] = {"num_classes": num_classes}
    fields = {field.name for field in dataclasses.fields(config)}
    if recipe.drop_path is not None:
        own["drop_path"] = recipe.drop_path
    if recipe.layerscale is not None and "scale_value" in fields:
        scale = getattr(config, "scale", "layerscale")
        if scale == "none" and config.family == "vit":  # the recipe trains networks with LayerScale
            own["scale"] = scale = "layerscale"
        if scale == "layerscale":
            own["scale_value"] = recipe.layerscale
    patch = options.get("patch_size", config.patch_size)
    if recipe.resolution is not None:
        own["img_size"] = (recipe.resolution, recipe.resolution)
        own["patch_size"] = patch
    return config.replace(**{**own, **options})


def _parse(key: str, text: str, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return text
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "null") and type(None) in get_args(hint):
            return None
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
        return _parse(key, text, hint)
    if origin is tuple:
        return tuple(_guess(part) for part in text.strip("()[]").split(",") if part.strip())
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() in words:
            return words[text.lower()]
        raise PatchloomError(f"{key} is true or false, not {text!r}.")
    try:
        return hint(text)
    except ValueError as error:
        kind = {int: "a whole number", float: "a number"}.get(hint, str(hint))
        raise PatchloomError(f"{key} is {kind}, not {text!r}.") from error


def _colours(key: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.strip("()[]").split(","))
    except ValueError as error:
        raise PatchloomError(f"{key} is one number, or one a colour: {key}=0.5,0.5,0.5, not {text!r}.") from error
    return numbers * 3 if len(numbers) == 1 else numbers


def _guess(text: str) -> Any:
    """A model option as the value that it looks like; its config checks the type."""
    word = text.strip()
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        value = json.loads(word)
    except json.JSONDecodeError:
        return word
    return tuple(value) if isinstance(value, list) else value
