"""Plans of runs: names, settings and weights resolved to a run config. Nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from patchloom.data.opening import open_source
from patchloom.data.splits import Splits
from patchloom.errors import PatchloomError, check_choice, check_place, did_you_mean
from patchloom.models.config import Config, PatchConfig
from patchloom.models.registry import find_config
from patchloom.models.roles import TUNINGS, tuned_parameters
from patchloom.recipes.changes import apply_changes, checked_options
from patchloom.recipes.cited import cite
from patchloom.recipes.networks import as_built, keep_scales, network_config
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import choose_recipe, finetuning_recipe
from patchloom.recipes.transfer import official_splits
from patchloom.tasks.classification.config import (
    ClassificationConfig,
    DistillationConfig,
    Method,
    Start,
    absolute_place,
    teacher_place,
)
from patchloom.tasks.classification.start import kind_of_head, open_start
from patchloom.tasks.opened import Opened
from patchloom.tasks.registry import find_task
from patchloom.tasks.spec import RunConfig

Place = str | PathLike[str]
# options of the network that its weights do not decide
_OF_THE_RUN = ("head", "drop_path", "drop_path_decay", "dropout", "queries")
_SMALLEST_PATCH = 8  # of the papers' networks
_SLOW = 5e-5  # rates below it suit a change of resolution, and hardly move a new head


def plan_training(
    data: str | PathLike[str],
    model: str | Config,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    options: Mapping[str, Any],
    labels: str | None = None,
    start: Start | None = None,
    distillation: DistillationConfig | None = None,
    scales_from: str | PathLike[str] | None = None,
    splits: Splits | None = None,
) -> RunConfig:
    """A run on `data`: names and changes resolved; nothing is read or written.

    Raises:
        PatchloomError: an unknown model, recipe or setting, or a combination that cannot be built.
    """
    check_place("data", data)
    if not isinstance(model, Config):
        check_place("model", model)
    config, options = find_config(str(model)) if not isinstance(model, Config) else model, checked_options(options)
    if config.kind != "image":
        raise PatchloomError(f"{config.name} is a network of {config.kind}, and cannot classify images.")
    if distillation:
        distillation = _resolve_distillation(distillation, config, options, start)
        options |= {"distilled": True} if distillation.method == "token" else {}
    resolved, notes = _resolve_recipe(recipe, config, options, changes, start is not None)
    if options.get("scale_form") == "published" and resolved.warmup_epochs and "warmup_epochs" not in changes:
        source = "ReZero, SkipInit, Fixup and T-Fixup were published without warm-up"
        notes.append(f"warmup_epochs 0: {source}.")
        resolved = cite(resolved, warmup_epochs=(0.0, source))
    if start is not None:
        start = dataclasses.replace(start, tune=resolved.tune)
    # Any number of classes would do: the data is not open yet.
    network = network_config(config, resolved, 2, options)  # refuses what cannot be built
    scales = None if scales_from is None else absolute_place(scales_from)
    if scales and options.get("scale_init", "constant") != "constant":
        raise PatchloomError("model.scale_init and --scales-from both set the start of the scales: give one.")
    resolved = as_built(resolved, network, changes, start is not None, scales)
    chosen_splits = official_splits(str(data), resolved.name, splits or Splits())
    task = ClassificationConfig(
        absolute_place(data), labels, config, options, start, distillation, scales, chosen_splits
    )
    return RunConfig(find_task("classification"), task, resolved, tuple(notes))


def _resolve_recipe(
    recipe: str | Recipe, config: Config, options: Mapping[str, Any], changes: Mapping[str, Any], trained: bool
) -> tuple[Recipe, list[str]]:
    """The recipe for a model of this size, with changes; `trained`: for weights, whose scales stay what they are."""
    deciding = ("dim", "depth", "branches", "patch_size")
    # Recipes depend on the size of the model: DeiT III and CaiT print a drop rate per depth.
    sized = _resized(config, {name: options[name] for name in deciding if name in options})
    chosen = choose_recipe(recipe, ClassificationOptions, sized)
    if chosen.resolution is not None and _is_for_small_images(sized) and "resolution" not in changes:
        chosen = chosen.replace(resolution=None)
    resolved, notes = apply_changes(keep_scales(chosen) if trained else chosen, changes, sized)
    if trained:
        return resolved, notes
    if changes.get("tune", "all") != "all":
        raise PatchloomError(f"tune={resolved.tune} is for `finetune`: a fresh network trains all of its parameters.")
    if "finetune" in resolved.name or "_to_1k" in resolved.name:
        notes.append(
            f"{resolved.name} is made for weights that are trained already; here the network starts at random."
        )
    return resolved.replace(tune="all"), notes


def _resized(config: Config, options: Mapping[str, Any]) -> Config:
    """The config by whose size a recipe chooses; its image has as many patches with another patch size."""
    if isinstance(config, PatchConfig) and isinstance(patch := options.get("patch_size"), int):
        height, width = config.grid
        options = {**options, "img_size": (height * patch, width * patch)}
    return config.replace(**options)


def _is_for_small_images(config: Config) -> bool:
    """Whether a network keeps its image size under every recipe. One for photos that was trained at a low resolution
    (DeiT III at 160 or 192) takes the recipe's."""
    return config.img_size[0] < 224 and getattr(config, "patch_size", 1) < _SMALLEST_PATCH


def _resolve_distillation(
    distillation: DistillationConfig, config: Config, options: Mapping[str, Any], start: Start | None
) -> DistillationConfig:
    """With the method: by default DeiT distils through its token (thesis 3.3), CaiT (supplement A.3), ResMLP and the
    others from hard labels."""
    if distillation.method is None:
        own = getattr(config, "distilled", False) or (start is None and config.family == "deit")
        method: Method = "token" if options.get("distilled", own) else "hard"
        distillation = dataclasses.replace(distillation, method=method)
    if distillation.method == "token" and options.get("distilled") is False:
        raise PatchloomError("--method token needs a distillation token: remove model.distilled=false.")
    return distillation


def plan_distillation(teacher: Place | Iterable[Place], method: str | None = None, **fields: Any) -> DistillationConfig:
    """One teacher or several, with fields of `DistillationConfig`."""
    known = [field.name for field in dataclasses.fields(DistillationConfig)[2:]]  # after teachers and method
    for name in fields:
        if name not in known:
            hint = did_you_mean(name, known)
            raise PatchloomError(f"Unknown key {name!r} of distillation. Choose from: {', '.join(known)}.{hint}")
    alone = isinstance(teacher, str | PathLike) or not isinstance(teacher, Iterable)
    several: list[Any] = [teacher] if alone else list(teacher)  # type: ignore[arg-type]
    for one in several:
        check_place("teacher", one)
    return DistillationConfig(tuple(teacher_place(one) for one in several), method, **fields)  # type: ignore[arg-type]


def plan_finetuning(
    weights: Place,
    data: Place,
    recipe: str | Recipe | None,
    changes: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    tune: str | None = None,
    delta: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    distillation: DistillationConfig | None = None,
    labels: str | None = None,
    splits: Splits | None = None,
) -> RunConfig:
    """A fine-tuning. Nothing is written, but the weights and the list of images are read.

    Args:
        weights: what `load` takes.
        recipe: None for the family's, which depends on whether the classes stay the same.
        options: of the network (those in `_OF_THE_RUN`) and hints for a file without metadata.
        tune: which parameters are trained; also sets the recipe's `tune`.
        delta: also export only what changed.
    """
    check_place("weights", weights)
    check_place("data", data)
    if not isinstance(distillation, DistillationConfig | None):
        raise PatchloomError(f"distillation is a DistillationConfig, not {type(distillation).__name__}.")
    options = checked_options(options)
    opened = Opened()
    source = opened.keep(open_source, absolute_place(data), labels)
    own = {name: value for name, value in options.items() if name in _OF_THE_RUN}
    hints = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
    if tune is not None:
        check_choice("--tune", tune, TUNINGS)
        if changes.get("tune", tune) != tune:
            raise PatchloomError(f"--tune {tune} contradicts tune={changes['tune']}: give one.")
        changes = {**changes, "tune": tune}
    network, start, notes = open_start(weights, source, hints, delta, mean, std, opened)
    if distillation and distillation.method == "token" and not getattr(network.config, "distilled", False):
        raise PatchloomError(
            f"{weights} has no distillation token: --method hard and --method soft teach a network without one."
        )
    if own.get("head", kind_of_head(network)) != kind_of_head(network):
        start = dataclasses.replace(start, class_names=None)  # a head of another kind starts from scratch too
    queries = getattr(network.config, "queries", None)
    if queries == "per_class" and own.get("queries", queries) != queries:
        raise PatchloomError(f"{weights} has one query per class: it cannot be fine-tuned to queries={own['queries']}.")
    per_class = queries == "one" and own.get("queries") == "per_class"
    same_classes = start.class_names is not None
    chosen = recipe or finetuning_recipe(network.config.family, same_classes, len(source.items()), per_class)
    if recipe is None:
        notes.append(f"The recipe is {chosen}; --recipe takes another.")
    plan = plan_training(
        data, network.config.with_head(), chosen, changes, own, labels, start, distillation, splits=splits
    )
    tuned_parameters(network, plan.recipe.tune)  # refuses what the network does not have
    if start.class_names is None:
        notes += _slow_head(plan.recipe)
    return dataclasses.replace(plan, notes=(*notes, *plan.notes), opened=opened)


def _slow_head(recipe: Recipe) -> list[str]:
    """What to say of a new head at a rate that would leave it near its random start."""
    rate = recipe.lr if recipe.head_lr is None else recipe.head_lr
    if rate >= _SLOW:
        return []
    return [
        f"The head is new, and {recipe.name} trains it at a learning rate of {rate:.3g}, which suits a change of "
        "resolution with the same classes. head_lr=5e-3 trains it faster; --recipe new_classes does so for new classes."
    ]
