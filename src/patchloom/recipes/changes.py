"""Changes of a recipe, from `key=value` words or Python values, and what follows from them for its other fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config
from patchloom.reading import parse_json
from patchloom.recipes.cited import Cited, cite
from patchloom.recipes.options import Options
from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.recipes.registry import on_change

_ALIASES = {"img_size": "resolution"}
_SET = "set for this run"


def parse_words(
    words: Iterable[str], options: type[Options], extra: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of a recipe with these task options, and of the model (`model.depth=2`), from `key=value` words; the last
    value of a key wins.

    Keys in `extra` take one number per colour channel, or one for all (`mean=0.5`). Raises PatchloomError for unknown
    keys and invalid values.
    """
    changes: dict[str, Any] = {}
    model: dict[str, Any] = {}
    types = setting_types(options)
    known = {*types, *(alias for alias, name in _ALIASES.items() if name in types), *extra}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise PatchloomError(f"{word!r} is not a setting. Write settings as key=value.")
        if key.startswith("model."):
            model[key.removeprefix("model.")] = _guess(value)
            continue
        if key in extra:
            changes[key] = _colours(key, value)
            continue
        name = _ALIASES.get(key, key)
        if key not in known:
            raise PatchloomError(
                f"There is no setting {key!r}.{did_you_mean(key, known)} Settings are fields of a recipe."
            )
        changes[name] = _parse(key, value, types[name])
    return changes, model


def checked_options(options: Any) -> dict[str, Any]:
    """Options of a model as given in Python, copied. Raises PatchloomError for anything but a dictionary."""
    if not isinstance(options, Mapping):
        raise PatchloomError(f"model_options is a dictionary such as {{'depth': 6}}, not {options!r}.")
    return dict(options)


def parse_hints(words: Iterable[str]) -> dict[str, Any]:
    """What a file of weights does not say, from `key=value` words: options of the model (`model.heads=3`), `img_size`,
    and `mean` and `std`, one number per colour channel or one for all."""
    hints: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key.startswith("model."):
            hints[key.removeprefix("model.")] = _guess(value)
        elif key in ("mean", "std"):
            hints[key] = _colours(key, value)
        elif key == "img_size":
            hints[key] = _guess(value)
        else:
            known = ("img_size", "mean", "std")
            raise PatchloomError(
                f"Unknown setting {key!r}.{did_you_mean(key, known)} Settings are img_size, mean, std and options "
                "of the model, such as model.heads=3."
            )
    return hints


def is_set_for_run(source: str) -> bool:
    """Whether the source of a value marks it as set by the user."""
    return source.startswith(_SET)


def apply_changes(recipe: Recipe, changes: Mapping[str, Any], model: Config | None = None) -> tuple[Recipe, list[str]]:
    """The changed recipe, and one sentence for each field that changes as a consequence.

    Fields that are not set follow those that are: the learning rate scales with the batch if the recipe says so,
    warm-up and step decay keep their share of a shorter run, the rules of the paper for longer runs, other batches or
    resolutions apply, a constant learning rate stays constant, and min_lr never exceeds a changed learning rate.
    """
    named = {_ALIASES.get(key, key): value for key, value in changes.items()}
    if named.get("epochs") is not None and named.get("steps") is not None:
        raise PatchloomError(
            f"epochs={named['epochs']} and steps={named['steps']} both set the length of the run. Give one of them."
        )
    changed, notes = recipe.replace(**named), []
    sources = {name: f"{_SET}; {recipe.name} has {getattr(recipe, name)}" for name in named}
    changed = dataclasses.replace(changed, sources={**recipe.sources, **sources})
    for name, (value, source) in _consequences(recipe, changed, model).items():
        # What the user set is never overruled by a consequence.
        if name not in named and value != getattr(changed, name):
            notes.append(f"{name} {value_text(value)}: {source}.")
            changed = cite(changed, **{name: (value, source)})
    if changed.schedule == "cosine" and changed.min_lr > changed.lr:
        notes.append(
            f"The rate rises from {changed.lr:.3g} to min_lr {changed.min_lr:.3g}: {changed.sources.get('min_lr')}."
        )
    return changed, notes


def _consequences(recipe: Recipe, changed: Recipe, model: Config | None) -> dict[str, Cited]:
    """Fields that follow from changed ones, each with its new value and the reason."""
    found: dict[str, Cited] = {}
    if recipe.lr_scaling == "linear" and changed.batch_size != recipe.batch_size:
        # The linear scaling rule (Goyal et al.): twice the batch, twice the rate.
        lr = recipe.lr * changed.batch_size / recipe.batch_size
        found["lr"] = lr, f"{recipe.lr:.3g} at batch {recipe.batch_size}, scaled with the batch"
    if changed.epochs != recipe.epochs and changed.steps is not None and changed.steps == recipe.steps:
        found["steps"] = None, f"the run has epochs={changed.epochs} instead"
    if changed.warmup_epochs >= changed.epochs:
        # A run that is shorter than its warm-up would never reach its learning rate.
        share = changed.epochs * recipe.warmup_epochs / max(recipe.epochs, 1)
        found["warmup_epochs"] = (
            share,
            f"shortened like the run, from {recipe.warmup_epochs:g} of {recipe.epochs} epochs",
        )
    if recipe.steps and changed.steps and changed.warmup_steps and changed.warmup_steps >= changed.steps:
        found["warmup_steps"] = (
            round(changed.steps * changed.warmup_steps / recipe.steps),
            f"shortened like the run, from {changed.warmup_steps} of {recipe.steps} steps",
        )
    if changed.epochs != recipe.epochs and recipe.decay_epochs:
        marks = tuple(round(mark * changed.epochs / recipe.epochs) for mark in recipe.decay_epochs)
        found["decay_epochs"] = marks, f"the same shares of the run as {recipe.decay_epochs} of {recipe.epochs}"
    if getattr(changed, "crop", None) == "pad" and recipe.crop != "pad":  # not every task has images to crop
        found["test_crop_ratio"] = 1.0, "published code: images that are padded and cropped are tested without resizing"
    if any(getattr(changed, name, None) != getattr(recipe, name, None) for name in _RULED):
        found |= on_change(changed, model)
    lr = found["lr"][0] if "lr" in found and changed.lr == recipe.lr else changed.lr
    if "lr" in found and recipe.min_lr == recipe.lr:
        found["min_lr"] = lr, f"as the rate, which {recipe.name} keeps constant"
    elif lr < changed.min_lr and lr != recipe.lr:
        found["min_lr"] = lr, f"no floor above the rate; {recipe.name} has {recipe.min_lr:.3g}"
    return found


_RULED = ("epochs", "batch_size", "resolution")  # fields whose change may trigger a rule of the paper


def value_text(value: Any) -> str:
    """A value in a message."""
    return f"{value:.3g}" if isinstance(value, float) else "none" if value is None else str(value)


def _parse(key: str, text: str, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return text
    if origin in (Union, UnionType):
        # `float | None` is parsed as a float, once "none" has been tried.
        hint, *_ = (choice for choice in get_args(hint) if choice is not type(None))
        named = get_origin(hint) is Literal and text in get_args(hint)  # scale=none is a scale, not a missing value
        if text.lower() in ("none", "null") and not named:
            return None
        return _parse(key, text, hint)
    if origin is tuple:
        return tuple(_guess(part) for part in text.strip("()[]").split(",") if part.strip())
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() in words:
            return words[text.lower()]
        raise PatchloomError(f"{key} must be true or false, not {text!r}.")
    try:
        return hint(text)
    except ValueError as error:
        kind = {int: "a whole number", float: "a number"}.get(hint, str(hint))
        raise PatchloomError(f"{key} must be {kind}, not {text!r}.") from error


def _colours(key: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.strip("()[]").split(","))
    except ValueError as error:
        raise PatchloomError(
            f"{key} must be one number, or one per colour as in {key}=0.5,0.5,0.5, not {text!r}."
        ) from error
    return numbers * 3 if len(numbers) == 1 else numbers


def _guess(text: str) -> Any:
    """Parse a model option as JSON or Python literal; the config checks the type."""
    word = text.strip()
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        value = parse_json(word)
    except ValueError:
        return word
    # Configs are hashable, so they hold tuples.
    return tuple(value) if isinstance(value, list) else value
