"""Plans of Grafit runs: names, settings and weights resolved to a run config. Nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.data.sources import Source
from patchloom.data.splits import Splits
from patchloom.errors import PatchloomError, check_place
from patchloom.models.config import Config
from patchloom.models.foreign import TIMM
from patchloom.models.registry import find_config
from patchloom.recipes.changes import apply_changes, checked_options
from patchloom.recipes.cited import Cited, cite
from patchloom.recipes.grafit import RetrievalOptions
from patchloom.recipes.networks import as_built, keep_scales
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import choose_recipe
from patchloom.tasks.classification.config import Start, absolute_place
from patchloom.tasks.classification.defaults import sized_recipe
from patchloom.tasks.classification.start import open_start
from patchloom.tasks.opened import Opened
from patchloom.tasks.registry import find_task
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.images import open_labelled
from patchloom.tasks.retrieval.terms import terms_of
from patchloom.tasks.spec import RunConfig
from patchloom.weights.hub import is_remote

Place = str | PathLike[str]
# options of the trunk that its weights do not decide
_OF_THE_RUN = ("drop_path", "drop_path_decay", "dropout")


def plan_grafit(
    data: Place,
    model: Place,
    recipe: str | Recipe | None = None,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    labels: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    clusters_from: Place | None = None,
    splits: Splits | None = None,
) -> RunConfig:
    """A run on `data`; the arguments are those of `patchloom.grafit`. The list of images and weights are read."""
    places = {"data": data, "model": model} | ({} if clusters_from is None else {"clusters_from": clusters_from})
    for name, place in places.items():
        check_place(name, place)
    changes, options = dict(changes or {}), checked_options(options or {})
    config = RetrievalConfig(absolute_place(data), labels, Config(), splits=splits or Splits())
    opened = Opened()
    source = open_labelled(config, opened, keep=True)
    trunk, start, own, notes = open_trunk(model, source, options, opened, mean, std)
    if trunk.kind != "image":
        raise PatchloomError(f"{trunk.name} is a network of {trunk.kind}, and Grafit embeds images.")
    if recipe is None:
        recipe, note = sized_recipe("grafit", source)
        notes.append(note)
    resolved, more = _resolve_recipe(recipe, trunk, own, changes, start is not None)
    if (clusters_from is not None) and resolved.clusters is None:
        raise PatchloomError("--clusters-from is for clusters as labels: set clusters=N, or --recipe clusterfit_plus.")
    terms_of(resolved, config.labelled)  # refuses what cannot be learned
    config = dataclasses.replace(
        config, model=trunk, model_options=own, start=start,
        clusters_from=None if clusters_from is None else absolute_place(clusters_from),
    )  # fmt: skip
    built = config.trunk_config(resolved)  # refuses what cannot be built
    resolved = as_built(resolved, built, changes, start is not None)
    return RunConfig(find_task("retrieval"), config, resolved, (*notes, *more), opened)


def open_trunk(
    model: Place, source: Source, options: dict[str, Any], opened: Opened, mean: Any, std: Any
) -> tuple[Config, Start | None, dict[str, Any], list[str]]:
    """The trunk's config, the weights that it starts from, the options of the run, and what the user should know."""
    if not _is_weights(model):
        if mean is not None or std is not None:
            raise PatchloomError(f"mean and std are for weights without metadata; {model} starts at random.")
        return find_config(str(model)), None, options, []
    # The other options are hints for a file of weights that does not describe its network.
    own = {name: value for name, value in options.items() if name in _OF_THE_RUN}
    hints = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
    network, start, _ = open_start(model, source, hints, False, mean, std, opened)
    return network.config, dataclasses.replace(start, class_names=None), own, []


def _is_weights(model: Place) -> bool:
    """Whether a name stands for weights to start from: a path, a published tag, timm:NAME.TAG or timm:NAME:FILE."""
    if isinstance(model, str) and model.startswith(TIMM):
        return any(mark in model.removeprefix(TIMM) for mark in ".:")
    return is_remote(model) or Path(model).exists()


def _resolve_recipe(
    recipe: str | Recipe, trunk: Config, options: Mapping[str, Any], changes: Mapping[str, Any], trained: bool
) -> tuple[Recipe, list[str]]:
    """The recipe for a trunk, with changes; `trained`: the trunk has weights, whose scales stay what they are."""
    deciding = ("dim", "depth", "branches", "patch_size")
    sized = trunk.replace(**{name: options[name] for name in deciding if name in options})
    chosen = choose_recipe(recipe, RetrievalOptions, sized)
    if chosen.resolution is not None and trunk.img_size[0] < 224 and "resolution" not in changes:
        chosen = chosen.replace(resolution=None)  # a model for small images keeps its size
    resolved, notes = apply_changes(keep_scales(chosen) if trained else chosen, changes, sized)
    return _slow_trunk(resolved, notes) if trained else (resolved, notes)


def _slow_trunk(recipe: Recipe, notes: list[str]) -> tuple[Recipe, list[str]]:
    """The recipe for a trunk with trained weights: lr becomes its lower rate; projector and predictor keep theirs as
    head_lr."""
    if recipe.trained_lr == 1 or recipe.head_lr is not None or not recipe.lr:
        return recipe, notes
    rate, full = recipe.lr * recipe.trained_lr, recipe.lr
    values: dict[str, Cited] = {
        "lr": (rate, f"trained_lr={recipe.trained_lr:g} of {full:.3g}: the trunk starts from trained weights"),
        "warmup_lr": (min(recipe.warmup_lr, rate), "no higher than lr"),
        "min_lr": (min(recipe.min_lr, rate), "no higher than lr"),
    }
    note = f"The trunk has trained weights and learns at {rate:.3g}; trained_lr=1 is for {full:.3g}."
    # Trained vectors are long, and a classifier of long vectors diverges at a high rate.
    if "ce" not in recipe.terms:
        values["head_lr"] = full, "lr, for projector and predictor: they are new"
        note = f"The trunk has trained weights and learns at {rate:.3g}, its projector at {full:.3g} (trained_lr)."
    changed = {name: value for name, value in values.items() if value[0] != getattr(recipe, name)}
    return cite(recipe, **changed), [*notes, note]
