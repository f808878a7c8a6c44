"""The config of a run as settings: what recipe.yaml holds, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.tasks.registry import find_task
from patchloom.tasks.spec import RunConfig


def settings_of(config: RunConfig) -> dict[str, Any]:
    """One flat object: the task with its config, then the fields of the recipe."""
    # "name" alone would not say whether it is the model's, the recipe's or the run's.
    recipe = {f"recipe_{key}" if key == "name" else key: value for key, value in config.recipe.to_json().items()}
    return {"task": config.task.label, **config.task.to_json(), **recipe}


def config_from_settings(values: Mapping[str, Any]) -> RunConfig:
    """The run config that settings describe, those of earlier versions too. KeyError, TypeError and AttributeError are
    signs of a damaged file."""
    spec = find_task(values["task"])
    current = spec.upgrade(values)
    # The settings are flat: names tell which are fields of the recipe, and which of the task.
    known = {*setting_types(spec.options), "summary", "sources"}
    fields = {key: value for key, value in current.items() if key in known}
    recipe = Recipe.of(spec.options, name=values["recipe_name"], **fields)
    return RunConfig(spec, spec.config_from_json(current), recipe)


def with_epochs(config: RunConfig, epochs: int) -> RunConfig:
    """The same run with another number of epochs."""
    return dataclasses.replace(config, recipe=config.recipe.replace(epochs=epochs))
