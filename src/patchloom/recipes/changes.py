"""`key=value` changes of a recipe, from words or from Python values."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config, PatchConfig
from patchloom.reading import parse_json
from patchloom.recipes.cited import Cited, cite
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import on_change

_ALIASES = {"img_size": "resolution"}
_SET = "set for this run"


def parse_words(words: Iterable[str], extra: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of the recipe, and of the model (`model.depth=2`), from `key=value` words; the last of a key wins.
    `extra` keys have one number a colour, or one for all (`mean=0.5`)."""
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    hints = get_type_hints(Recipe)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise PatchloomError(f"{word!r} is not a setting: settings are written key=value.")
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


def is_set_for_run(source: str) -> bool:
    """Whether the source of a value says that the user gave it."""
    return source.startswith(_SET)


def apply_changes(recipe: Recipe, changes: Mapping[str, Any], model: Config | None = None) -> tuple[Recipe, list[str]]:
    """The recipe with changes, and sentences on what follows from them.

    Fields that are not named follow those that are: the rate follows the batch where the recipe scales it, warm-up and
    step decay keep their share of a shorter run, a paper's own rules for longer runs, other batches or resolutions
    apply, a constant rate stays constant, and the floor of the rate is never above a rate that was changed.
    """
    named = {_ALIASES.get(key, key): value for key, value in changes.items()}
    changed, notes = recipe.replace(**named), []
    said = {name: f"{_SET}; {recipe.name} has {getattr(recipe, name)}" for name in named}
    changed = dataclasses.replace(changed, sources={**recipe.sources, **said})
    for name, (value, source) in _consequences(recipe, changed, model).items():
        if name not in named and value != getattr(changed, name):
            notes.append(f"{name} {_text(value)}: {source}.")
            changed = cite(changed, **{name: (value, source)})
    if changed.schedule == "cosine" and changed.min_lr > changed.lr:
        notes.append(
            f"The rate rises from {changed.lr:.3g} to min_lr {changed.min_lr:.3g}: {changed.sources.get('min_lr')}."
        )
    return changed, notes


def _consequences(recipe: Recipe, changed: Recipe, model: Config | None) -> dict[str, Cited]:
    """Fields that follow from changed ones, with the reasons."""
    found: dict[str, Cited] = {}
    if recipe.lr_scaling == "linear" and changed.batch_size != recipe.batch_size:
        lr = recipe.lr * changed.batch_size / recipe.batch_size
        found["lr"] = lr, f"{recipe.lr:.3g} at batch {recipe.batch_size}, scaled with the batch"
    if changed.warmup_epochs >= changed.epochs:
        share = changed.epochs * recipe.warmup_epochs / max(recipe.epochs, 1)
        found["warmup_epochs"] = share, f"its share of the recipe's {recipe.epochs} epochs"
    if changed.epochs != recipe.epochs and recipe.decay_epochs:
        marks = tuple(round(mark * changed.epochs / recipe.epochs) for mark in recipe.decay_epochs)
        found["decay_epochs"] = marks, f"the same shares of the run as {recipe.decay_epochs} of {recipe.epochs}"
    if changed.crop == "pad" and recipe.crop != "pad":
        found["test_crop_ratio"] = 1.0, "published code: images that are padded and cropped are tested without resizing"
    if any(getattr(changed, name) != getattr(recipe, name) for name in _RULED):
        found |= on_change(changed, model)
    lr = found["lr"][0] if "lr" in found and changed.lr == recipe.lr else changed.lr
    if "lr" in found and recipe.min_lr == recipe.lr:
        found["min_lr"] = lr, f"as the rate, which {recipe.name} keeps constant"
    elif lr < changed.min_lr and lr != recipe.lr:
        found["min_lr"] = lr, f"no floor above the rate; {recipe.name} has {recipe.min_lr:.3g}"
    return found


_RULED = ("epochs", "batch_size", "resolution")  # changes that a paper may have a rule for


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
    decay = None if of_timm else "uniform"  # timm has its own way to spread drop_path
    has = {
        "drop_path": getattr(network, "drop_path", 0.0),
        "drop_path_decay": getattr(network, "drop_path_decay", decay),
        "dropout": getattr(network, "dropout", 0.0),
        "scale": getattr(network, "scale", "none" if start is None else "layerscale"),
        "layerscale": None if trained or scales_from else start,
    }
    changed = {name: value for name, value in has.items() if value != getattr(recipe, name)}
    for name in changed:
        if name in explicit and getattr(recipe, name) is not None:
            why = f"it has {_text(has[name])}"
            if name == "layerscale" and scales_from:
                why = f"its scales start as those of {scales_from}"
            elif trained and "scale" in name:
                why = "its weights hold their scales"
            raise PatchloomError(f"{name}={_text(getattr(recipe, name))} cannot be set for {network.name}: {why}.")
    sources = {name: f"{network.name}; {recipe.name} has {_text(getattr(recipe, name))}" for name in changed}
    if scales_from:
        sources["layerscale"] = f"the scales of {scales_from}"
    return dataclasses.replace(recipe.replace(**changed), sources={**recipe.sources, **sources})


def keep_scales(recipe: Recipe) -> Recipe:
    """The recipe for weights that are trained already: their scales stay what they are."""
    return recipe.replace(scale=None, layerscale=None)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "none" if value is None else str(value)


def _parse(key: str, text: str, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return text
    if origin in (Union, types.UnionType):
        hint, *_ = (choice for choice in get_args(hint) if choice is not type(None))
        named = get_origin(hint) is Literal and text in get_args(hint)  # scale=none is a scale, not "as the model says"
        if text.lower() in ("none", "null") and not named:
            return None
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
        value = parse_json(word)
    except ValueError:
        return word
    return tuple(value) if isinstance(value, list) else value
