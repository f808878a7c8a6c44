"""A supervised task from parts of the user's own, completed by ours where none is given."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.data.own import OwnAugment, is_dataset
from patchloom.data.randomness import seed_of
from patchloom.data.splits import Splits, split_source
from patchloom.data.transforms import Augment
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing, default_preprocessing
from patchloom.models.registry import create_model
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.own.config import OwnConfig
from patchloom.tasks.own.samples import Samples, SourceData, held_out_indices
from patchloom.tasks.own.task import Loss, Supervised
from patchloom.training.processes import Processes

_HELD_OUT = 0.2


def open_supervised(
    data: Any,
    model: str | nn.Module,
    recipe: Recipe,
    processes: Processes,
    console: Console,
    *,
    validation: Any = None,
    loss: Loss | None = None,
    augmentation: Any = None,
    splits: Splits | None = None,
    labels: str | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> Supervised:
    """The task: a module or a model's name, a data set or a source of images, and the rest by default.

    Wrong types are a `PatchloomError` that says what was expected.
    """
    _check_parts(data, model, loss, augmentation, validation)
    train, held_out, names = _data(data, validation, splits or Splits(), labels)
    module = _module(model, names, recipe, model_options or {})
    preprocessing = _preprocessing(module, recipe)
    augment = _augment(augmentation, recipe)
    name = model if isinstance(model, str) else part_name(model)
    parts = {"loss": loss, "augmentation": augmentation, "dataset": data if is_dataset(data) else None}
    described = {key: part_name(part) for key, part in parts.items() if part is not None}
    where = str(data) if isinstance(data, str | PathLike) else part_name(data)
    console.say(f"{where}: {len(train[1])} training samples, {len(held_out[1])} held out.")
    return Supervised(
        OwnConfig(where, name, described),
        module,
        loss or F.cross_entropy,
        Samples(*train, preprocessing, augment, recipe.seed),
        Samples(*held_out, preprocessing),
        preprocessing,
        recipe,
        processes,
        console,
    )


def _check_parts(data: Any, model: Any, loss: Any, augmentation: Any, validation: Any) -> None:
    if not isinstance(model, str | nn.Module):
        raise PatchloomError(f"model is a name or a torch.nn.Module, not {type(model).__name__}.")
    for name, part in (("loss", loss), ("augmentation", augmentation)):
        if part is not None and not callable(part):
            raise PatchloomError(f"{name} is a function, not {type(part).__name__}.")
    for name, part in (("data", data), ("validation", validation)):
        if part is not None and not isinstance(part, str | PathLike) and not is_dataset(part):
            raise PatchloomError(
                f"{name} is a folder, a file, another source, or a data set with __len__ and __getitem__, not "
                f"{type(part).__name__}."
            )
        if is_dataset(part) and not len(part):
            raise PatchloomError(f"{name}, {type(part).__name__}, is empty.")


Part = tuple[Any, list[int]]  # a data set, and the indices of it that belong to the part


def _data(data: Any, validation: Any, splits: Splits, labels: str | None) -> tuple[Part, Part, int | None]:
    """What to learn from, what to hold out, and the number of classes where the data says it."""
    if not is_dataset(data):
        source = open_source(data, labels)
        split = split_source(source, splits)
        parts = (SourceData(source, split.train), SourceData(source, split.held_out))
        train, held_out = ((part, list(range(len(part)))) for part in parts)
        return train, held_out, len(source.class_names)
    classes = getattr(data, "classes", None)
    count = len(classes) if classes is not None else None
    if validation is not None:
        return (data, list(range(len(data)))), (validation, list(range(len(validation)))), count
    fraction = _HELD_OUT if splits.hold_out is None else float(splits.hold_out)
    held = held_out_indices(len(data), fraction)
    kept = [index for index in range(len(data)) if index not in held]
    return (data, kept), (data, sorted(held)), count


def _module(model: str | nn.Module, classes: int | None, recipe: Recipe, options: Mapping[str, Any]) -> nn.Module:
    if isinstance(model, nn.Module):
        if options:
            raise PatchloomError(
                "model_options are for models by name; build your own module with the options it needs."
            )
        return model
    if classes is None and "num_classes" not in options:
        raise PatchloomError(
            "The number of classes is not known: give the data set an attribute `classes`, a list of names, or pass "
            "model_options={'num_classes': N}."
        )
    size = {} if recipe.resolution is None else {"img_size": recipe.resolution}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "start"))
        return create_model(model, **{"num_classes": classes or 1, **size, **options})


def _preprocessing(module: nn.Module, recipe: Recipe) -> Preprocessing:
    """How images that are not tensors are prepared: as the module says, or as for ImageNet."""
    own = getattr(module, "preprocessing", None)
    if not isinstance(own, Preprocessing):
        side = recipe.resolution or 224
        own = default_preprocessing("deit", (side, side), 3)
    return dataclasses.replace(own, crop_ratio=recipe.test_crop_ratio, interpolation=recipe.interpolation)


def _augment(augmentation: Any, recipe: Recipe) -> Any:
    if augmentation is not None:
        return OwnAugment(augmentation)
    return Augment(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augment)})


def part_name(part: Any) -> str:
    """A name for a module, a function or a data set, for people."""
    named = inspect.isfunction(part) or inspect.isclass(part)
    return str(part.__name__ if named else type(part).__name__)
