"""Names of recipes, and the values of a recipe for a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config, PatchConfig
from patchloom.models.convnet import ConvNetConfig
from patchloom.recipes.beit import BEIT_SMALL, beit, beit_finetune
from patchloom.recipes.cait import cait, depth_study
from patchloom.recipes.cited import Cited
from patchloom.recipes.deit import DEIT, DEIT_CIFAR10, VIT_AUGREG, VIT_ORIGINAL
from patchloom.recipes.deit3 import (
    deit3_1k,
    deit3_21k,
    deit3_21k_to_1k,
    deit3_finetune,
    finetune_at_224,
    longer_1k,
    longer_21k,
)
from patchloom.recipes.dino import DINO, DINO_SMALL
from patchloom.recipes.grafit import GRAFIT_RECIPES, GRAFIT_SMALL
from patchloom.recipes.mae import MAE, MAE_SMALL, mae_finetune
from patchloom.recipes.options import Options
from patchloom.recipes.patchconvnet import (
    patchconvnet,
    patchconvnet_21k,
    patchconvnet_21k_to_1k,
    patchconvnet_finetune,
    patchconvnet_per_class,
    rate_at_batch,
)
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.resmlp import OLD_FASHIONED, resmlp, resmlp_21k
from patchloom.recipes.rsb import RESNET_A2
from patchloom.recipes.small import SUFFIX, small
from patchloom.recipes.three_things import vit_a2, vit_a2_ls
from patchloom.recipes.transfer import (
    DEIT_FINETUNE,
    GRAFIT_TRANSFER,
    GRAFIT_TRANSFER_CUTMIX,
    NEW_CLASSES,
    TRANSFER_FOOD,
    cait_finetune,
    resmlp_finetune,
    transfer_cars,
    transfer_cifar,
    transfer_flowers,
    transfer_inat18,
    transfer_inat19,
)
from patchloom.recipes.translation import RESMLP_MT, RESMLP_MT_SMALL, TRANSFORMER_MT, TRANSFORMER_MT_SMALL


def _always(recipe: Recipe, _: PatchConfig | None) -> Recipe:
    """A recipe that is the same for every model."""
    return recipe


_RECIPES: dict[str, Callable[[PatchConfig | None], Recipe]] = {
    "deit": lambda _: DEIT,
    "cait": cait,
    "depth_study": depth_study,
    "resmlp": resmlp,
    "resmlp_21k": resmlp_21k,
    "patchconvnet": patchconvnet,
    "patchconvnet_21k": patchconvnet_21k,
    "patchconvnet_21k_to_1k": patchconvnet_21k_to_1k,
    "patchconvnet_finetune": patchconvnet_finetune,
    "patchconvnet_per_class": patchconvnet_per_class,
    "vit_a2": vit_a2,
    "vit_a2_ls": vit_a2_ls,
    "deit3_1k": deit3_1k,
    "deit3_21k": deit3_21k,
    "deit3_21k_to_1k": deit3_21k_to_1k,
    "deit3_finetune": deit3_finetune,
    "resnet_a2": lambda _: RESNET_A2,
    "old_fashioned": lambda _: OLD_FASHIONED,
    "vit_original": lambda _: VIT_ORIGINAL,
    "vit_augreg": lambda _: VIT_AUGREG,
    "deit_cifar10": lambda _: DEIT_CIFAR10,
    "deit_finetune": lambda _: DEIT_FINETUNE,
    "cait_finetune": cait_finetune,
    "resmlp_finetune": resmlp_finetune,
    "new_classes": lambda _: NEW_CLASSES,
    "transfer_cifar": transfer_cifar,
    "transfer_flowers": transfer_flowers,
    "transfer_cars": transfer_cars,
    "transfer_food": lambda _: TRANSFER_FOOD,
    "transfer_inat18": transfer_inat18,
    "transfer_inat19": transfer_inat19,
    "grafit_transfer": lambda _: GRAFIT_TRANSFER,
    "grafit_transfer_cutmix": lambda _: GRAFIT_TRANSFER_CUTMIX,
    **{name: partial(_always, recipe) for name, recipe in GRAFIT_RECIPES.items()},
    "dino": lambda _: DINO,
    "beit": beit,
    "beit_finetune": beit_finetune,
    "mae": lambda _: MAE,
    "mae_finetune": mae_finetune,
    "resmlp_mt": lambda _: RESMLP_MT,
    "transformer_mt": lambda _: TRANSFORMER_MT,
}
# small forms that have rules of their own
_OWN_SMALL = (
    DINO_SMALL, BEIT_SMALL, MAE_SMALL, RESMLP_MT_SMALL, TRANSFORMER_MT_SMALL,
)  # fmt: skip
_SMALL = {**GRAFIT_SMALL, **{recipe.name: recipe for recipe in _OWN_SMALL}}
# rules of papers for other numbers of epochs, batch sizes or resolutions; @small forms have none
_ON_CHANGE: dict[str, Callable[[Recipe, PatchConfig | None], dict[str, Cited]]] = {
    "deit3_1k": longer_1k,
    "deit3_21k": longer_21k,
    "deit3_finetune": finetune_at_224,
    "patchconvnet_21k": rate_at_batch,
}
_FINETUNING = {
    "deit": "deit_finetune", "deit3": "deit3_finetune", "vit": "deit3_finetune", "cait": "cait_finetune",
    "resmlp": "resmlp_finetune", "patchconvnet": "patchconvnet_finetune", "convnet": "patchconvnet_finetune",
}  # fmt: skip
FEW_IMAGES = 20_000


def list_recipes(options: type[Options] = Options) -> list[str]:
    """The names of the recipes of the papers, then of their small forms; only those with task options of this kind."""
    papers = [name for name, make in _RECIPES.items() if isinstance(make(None).options, options)]
    return [*papers, *(name + SUFFIX for name in papers)]


def find_recipe(name: str, model: Config | None = None) -> Recipe:
    """The recipe of this name with the values for `model`, by default for the reference model of the paper.

    Raises PatchloomError if there is no such recipe.
    """
    if not isinstance(name, str):
        raise PatchloomError(f"A recipe must be given by its name, not {name!r}.")
    paper = name.removesuffix(SUFFIX)
    if paper not in _RECIPES:
        known = list_recipes() if "@" in name else _RECIPES
        raise PatchloomError(
            f"Unknown recipe {name!r}.{did_you_mean(name, known)} `patchloom recipes` lists all recipes."
        )
    if name in _SMALL:
        return _SMALL[name]
    recipe = _RECIPES[paper](_by_size(model))
    return recipe if name == paper else small(recipe)


def choose_recipe(recipe: str | Recipe, options: type[Options] = Options, model: Config | None = None) -> Recipe:
    """A recipe by its name, or as it is.

    Raises PatchloomError if there is no such recipe, or if its options are not of the kind that the task reads.
    """
    if not isinstance(recipe, str | Recipe):
        raise PatchloomError(f"recipe is the name of a recipe or a Recipe, not {type(recipe).__name__}.")
    chosen = find_recipe(recipe, model) if isinstance(recipe, str) else recipe
    if not isinstance(chosen.options, options):
        raise PatchloomError(
            f"{chosen.name} is a recipe for {chosen.options.TASK}, not for {options.TASK}. "
            f"`patchloom recipes` lists all recipes."
        )
    return chosen


def on_change(recipe: Recipe, model: Config | None) -> dict[str, Cited]:
    """Fields that change by a rule of the paper with the number of epochs, the batch size or the resolution."""
    rule = _ON_CHANGE.get(recipe.name)
    return rule(recipe, _by_size(model)) if rule else {}


def _by_size(model: Config | None) -> PatchConfig | None:
    """Recipes choose values by width and depth. A network of another library gets those of a convnet."""
    if model is None or isinstance(model, PatchConfig):
        return model
    return ConvNetConfig(name=model.name, family="convnet")


def finetuning_recipe(family: str, same_classes: bool, images: int, per_class: bool = False) -> str:
    """The default recipe for fine-tuning weights of a family.

    With the same classes, the recipe of the paper (for another resolution, or for one query per class), in its small
    form for few images; with new classes, patchloom's own.
    """
    if not same_classes:
        return NEW_CLASSES.name
    paper = "patchconvnet_per_class" if per_class else _FINETUNING.get(family, DEIT_FINETUNE.name)
    return paper + SUFFIX if images < FEW_IMAGES else paper
