"""What `train` chooses where nothing is given: a model and a recipe that fit the data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from statistics import median

from patchloom.data.decoding import open_header
from patchloom.data.opening import open_source
from patchloom.data.sources import Source, spread
from patchloom.errors import PatchloomError
from patchloom.models.registry import find_config
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.registry import FEW_IMAGES, choose_recipe, find_recipe
from patchloom.recipes.small import SUFFIX
from patchloom.tasks.classification.config import absolute_place
from patchloom.tasks.opened import Opened

SMALL_SIDE = 64  # pixels, up to which an image is for a network with patches of 4
_SAMPLED = 64  # images whose size is read
_MODELS = {  # of a family: for small images, for few photos, for many
    "deit": ("deit_nano", "deit_tiny", "deit_small"),
    "deit3": ("deit3_nano", "deit3_small", "deit3_small"),
    "cait": ("cait_nano", "cait_xxs24", "cait_xxs24"),
    "resmlp": ("resmlp_nano", "resmlp_s12", "resmlp_s24"),
    "patchconvnet": ("patchconvnet_nano", "patchconvnet_s20", "patchconvnet_s60"),
}
_RECIPES = {"deit": "deit", "deit3": "deit3_1k", "cait": "cait", "resmlp": "resmlp", "patchconvnet": "patchconvnet"}
_ACCUMULATED = 64  # images at a time where the recipe's batch is larger than most memories


@dataclass(frozen=True)
class Choice:
    """A model, a recipe and settings, with the reason for them."""

    model: str
    recipe: str
    settings: tuple[str, ...] = ()  # key=value
    reason: str = ""


def choose(
    data: str | PathLike[str],
    labels: str | None = None,
    model: str | None = None,
    recipe: str | None = None,
    opened: Opened | None = None,
) -> Choice:
    """Complete a model or a recipe, or choose both: by the size of the images and by their number. `opened` keeps the
    source."""
    if model is not None and recipe is not None:
        return Choice(model, recipe)
    source = (opened or Opened()).keep(open_source, absolute_place(data), labels)
    count, side = len(source.items()), median_side(source)
    # A model decides its family; without one the recipe does, and without both DeiT.
    family = _family_of("deit" if recipe is None else recipe) if model is None else find_config(model).family
    few = side <= SMALL_SIDE or count < FEW_IMAGES
    size = 0 if side <= SMALL_SIDE else 1 if few else 2
    chosen = _RECIPES.get(family, "deit") + SUFFIX * few if recipe is None else recipe
    batch = find_recipe(chosen).batch_size
    # The effective batch stays the recipe's: its learning rate was tuned for it.
    settings = () if recipe or batch <= _ACCUMULATED else (f"accumulate={batch // _ACCUMULATED}",)
    reason = f"{count} images, the median of their shorter sides {side:g} pixels"
    return Choice(_MODELS[family][size] if model is None else model, chosen, settings, reason)


def _family_of(recipe: str) -> str:
    """The family whose paper a recipe is from; DeiT's networks are those of most others."""
    choose_recipe(recipe, ClassificationOptions)  # refuses an unknown one, and that of another task
    return next((name for name in sorted(_MODELS, key=len, reverse=True) if recipe.startswith(name)), "deit")


def sized_recipe(paper: str, source: Source) -> tuple[str, str]:
    """A paper's recipe, in its small form if the images are small or few, and a note that says so."""
    few = len(source.items()) < FEW_IMAGES or median_side(source) <= SMALL_SIDE
    chosen = paper + SUFFIX * few
    return chosen, f"The recipe is {chosen}; --recipe takes another."


def median_side(source: Source) -> float:
    """The median of the shorter sides of some images, in pixels; what cannot be read is left out."""
    sides = []
    for item in spread(source.items(), _SAMPLED):
        with suppress(PatchloomError, OSError, ValueError):
            data = source.data(item)
            sides.append(min((source.read(item) if data is None else open_header(data)).size))
    if not sides:
        raise PatchloomError(f"No image of {source.where} could be read.")
    return float(median(sides))
