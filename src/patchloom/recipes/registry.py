"""Names of recipes, and the values that a recipe takes for a model."""

from __future__ import annotations

from collections.abc import Callable

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config
from patchloom.recipes.cait import cait
from patchloom.recipes.deit import DEIT
from patchloom.recipes.deit3 import deit3_1k, deit3_21k, deit3_21k_to_1k, deit3_finetune
from patchloom.recipes.patchconvnet import (
    patchconvnet,
    patchconvnet_21k,
    patchconvnet_21k_to_1k,
    patchconvnet_finetune,
)
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.resmlp import OLD_FASHIONED, resmlp
from patchloom.recipes.rsb import RESNET_A2
from patchloom.recipes.small import SUFFIX, small
from patchloom.recipes.three_things import vit_a2, vit_a2_ls

_RECIPES: dict[str, Callable[[Config | None], Recipe]] = {
    "deit": lambda _: DEIT,
    "cait": cait,
    "resmlp": resmlp,
    "patchconvnet": patchconvnet,
    "patchconvnet_21k": patchconvnet_21k,
    "patchconvnet_21k_to_1k": patchconvnet_21k_to_1k,
    "patchconvnet_finetune": patchconvnet_finetune,
    "vit_a2": vit_a2,
    "vit_a2_ls": vit_a2_ls,
    "deit3_1k": deit3_1k,
    "deit3_21k": deit3_21k,
    "deit3_21k_to_1k": deit3_21k_to_1k,
    "deit3_finetune": deit3_finetune,
    "resnet_a2": lambda _: RESNET_A2,
    "old_fashioned": lambda _: OLD_FASHIONED,
}


def list_recipes() -> list[str]:
    """The names of the papers' recipes, then of their small forms."""
    return [*_RECIPES, *(name + SUFFIX for name in _RECIPES)]


def find_recipe(name: str, model: Config | None = None) -> Recipe:
    """The recipe of a name, with the values for `model`, or for the paper's reference model without one."""
    if not isinstance(name, str):
        raise PatchloomError(f"A recipe is called by its name, not by {name!r}.")
    paper = name.removesuffix(SUFFIX)
    if paper not in _RECIPES:
        known = list_recipes() if "@" in name else _RECIPES
        raise PatchloomError(
            f"There is no recipe {name!r}.{did_you_mean(name, known)} `patchloom recipes` lists them all."
        )
    recipe = _RECIPES[paper](model)
    return recipe if name == paper else small(recipe)
