"""A task from parts of the user's own, completed by ours where none is given.

A network of ours, by name or as an object, is trained by `Classification` with the recipe as it is; the own parts stand
in for its dataset, loss or augmentation. Any other module is trained by `Supervised`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.nn import functional as F

from patchloom.data.opening import open_source
from patchloom.data.own import OwnAugment, is_dataset
from patchloom.data.own import open_own as open_own_source
from patchloom.data.sources import Source
from patchloom.data.splits import Splits, split_source
from patchloom.data.transforms import Augment
from patchloom.errors import PatchloomError, errors_in
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing, default_preprocessing
from patchloom.recipes.changes import apply_changes, checked_options
from patchloom.recipes.cited import cite
from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.recipes.registry import choose_recipe
from patchloom.tasks.classification.losses import Loss
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.classification.setup import OwnParts, open_task
from patchloom.tasks.own.config import OwnConfig, OwnOptions
from patchloom.tasks.own.samples import OwnSamples, SourceData
from patchloom.tasks.own.split import split_indices
from patchloom.tasks.own.task import Supervised
from patchloom.tasks.spec import Context
from patchloom.training.task import Task

# without effect beside a loss, or an augmentation, of the user's own: values that recipe.yaml then records
_WITHOUT_LOSS = {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, "erasing": 0.0}
_WITHOUT_AUGMENTATION = {"augmentation": "none", "color_jitter": 0.0, "affine": 0.0, "flip": 0.0}


@dataclasses.dataclass(frozen=True)
class OwnRun:
    """What `train` was given: at least one part is the user's own."""

    data: Any
    model: str | nn.Module
    validation: Any = None
    loss: Loss | None = None
    augmentation: Any = None
    splits: Splits = dataclasses.field(default_factory=Splits)
    labels: str | None = None
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_settings()

    def _check_parts(self) -> None:
        """Refuse parts of the wrong type, and empty datasets."""
        if not isinstance(self.model, str | nn.Module):
            raise PatchloomError(f"model is a name or a torch.nn.Module, not {type(self.model).__name__}.")
        for name in ("loss", "augmentation"):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise PatchloomError(f"{name} is a function, not {type(part).__name__}.")
        if isinstance(self.loss, nn.Module) and any(part.requires_grad for part in self.loss.parameters()):
            raise PatchloomError(
                f"The loss {type(self.loss).__name__} has parameters, which would not be trained: put them into the "
                "model, or write a task (patchloom.fit)."
            )
        for name in ("data", "validation"):
            part = getattr(self, name)
            is_place = name == "data" and isinstance(part, str | PathLike)
            if part is not None and not is_place and not is_dataset(part):
                raise PatchloomError(
                    f"{name} is {'a folder, a file, another source, or ' * (name == 'data')}a dataset with __len__ and "
                    f"__getitem__, not {type(part).__name__}."
                )
            with errors_in(f"len({name})"):
                empty = is_dataset(part) and not len(part)
            if empty:
                raise PatchloomError(f"{name}, {type(part).__name__}, is empty.")

    def _check_settings(self) -> None:
        """Refuse settings that would have no effect beside a part."""
        if self.validation is not None and not is_dataset(self.data):
            raise PatchloomError("validation goes with a dataset of your own; other data has splits: test_split=...")
        asked = (self.labels, self.splits.train, self.splits.test)
        if is_dataset(self.data) and any(part is not None for part in asked):
            raise PatchloomError(
                "labels, train_split and test_split have no effect with a dataset of your own: pass validation=DATASET "
                "or hold_out=FRACTION."
            )
        if self.validation is not None and self.splits.hold_out is not None:
            raise PatchloomError("hold_out has no effect with a validation dataset: leave it out.")
        checked_options(self.model_options)
        if isinstance(self.model, nn.Module) and self.model_options:
            raise PatchloomError("model_options are for models by name; build your own module as you need it.")

    @property
    def where(self) -> str:
        return str(self.data) if isinstance(self.data, str | PathLike) else f"dataset {part_name(self.data)}"

    def parts(self) -> dict[str, str]:
        """The names of the parts that are the user's own."""
        own = {"loss": self.loss, "augmentation": self.augmentation, "validation": self.validation}
        own["dataset"] = self.data if is_dataset(self.data) else None
        own["model"] = self.model if isinstance(self.model, nn.Module) else None
        return {name: part_name(part) for name, part in own.items() if part is not None}


def own_config(run: OwnRun, task: Task) -> OwnConfig:
    """What recipe.yaml holds of such a run."""
    network = task.modules["model"]
    described = network.config.to_json() if isinstance(network, Network) else {"name": part_name(network)}
    return OwnConfig(run.where, described, run.parts())


def open_own(run: OwnRun, recipe: str | Recipe, changes: Mapping[str, Any], context: Context) -> tuple[Task, Recipe]:
    """The task and its recipe, with what applies of it.

    Returns:
        The task, and the recipe with what it does not apply set to "none" values, as recipe.yaml records it.

    Raises:
        PatchloomError: a part has the wrong type, or a setting has no effect beside it.
    """
    if isinstance(run.loss, nn.Module):  # such as the class weights of nn.CrossEntropyLoss
        run.loss.to(context.processes.device)
    if isinstance(run.model, str | Network):
        return _open_classification(run, recipe, changes, context)
    return _open_supervised(run, recipe, changes, context)


def _open_classification(
    run: OwnRun, recipe: str | Recipe, changes: Mapping[str, Any], context: Context
) -> tuple[Task, Recipe]:
    # A place is opened by `open_task`, as for any run; only a dataset is not known to it.
    model = run.model.config if isinstance(run.model, Network) else str(run.model)
    source = _open_dataset(run) if is_dataset(run.data) else None
    data = run.where if source is not None else run.data
    # From here on it is an ordinary classification, in which some parts are replaced.
    planned = plan_training(data, model, recipe, changes, run.model_options, run.labels, splits=run.splits)
    resolved = _without(planned.recipe, run, changes)
    augmentation = OwnAugment(run.augmentation) if run.augmentation else None
    own = OwnParts(source, _checked_network(run.model, source), run.loss, augmentation)
    task = open_task(planned.task, resolved, context, own)
    context.console.say(*planned.notes)
    return task, resolved


def _open_dataset(run: OwnRun) -> Source:
    """The source of an own dataset. Where it does not name its classes, the model decides how many there are."""
    num_classes = (
        run.model.config.num_classes if isinstance(run.model, Network) else run.model_options.get("num_classes")
    )
    return open_own_source(run.data, run.validation, num_classes=num_classes)


def _checked_network(model: Any, source: Source | None) -> Network | None:
    """A network of ours that was given as an object, if its outputs fit the classes; None for a name."""
    if not isinstance(model, Network):
        return None
    if source is not None and model.config.num_classes != len(source.class_names):
        raise PatchloomError(
            f"{model.config.name} has {model.config.num_classes} classes, the data {len(source.class_names)}: "
            f"model.reset_head({len(source.class_names)}) first."
        )
    return model


def _without(recipe: Recipe, run: OwnRun, changes: Mapping[str, Any]) -> Recipe:
    """The recipe without what an own loss or augmentation replaces; asked for beside it, that is refused."""
    for part, values in (("loss", _WITHOUT_LOSS), ("augmentation", _WITHOUT_AUGMENTATION)):
        if getattr(run, part) is None:
            continue
        # The recipe's own values are dropped; values that the user asked for are an error.
        if asked := sorted(set(changes) & set(values)):
            raise PatchloomError(f"{', '.join(asked)} has no effect with {part} of your own: leave it out.")
        recipe = cite(recipe, **{name: (value, f"none beside an own {part}") for name, value in values.items()})
    return recipe


def _open_supervised(
    run: OwnRun, recipe: str | Recipe, changes: Mapping[str, Any], context: Context
) -> tuple[Supervised, Recipe]:
    chosen = choose_recipe(recipe)
    # Such as mixup or drop_path: without a network of ours nothing would read them.
    of_networks = set(setting_types(type(chosen.options))) - set(setting_types(OwnOptions))
    if unused := sorted(of_networks & set(changes)):
        raise PatchloomError(f"{', '.join(unused)} has no effect with a module of your own: leave it out.")
    resolved, notes = apply_changes(_for_modules(chosen), changes)
    assert isinstance(run.model, nn.Module)
    preprocessing = _preprocessing(run.model, resolved)
    train, held_out = _data(run)
    augment = OwnAugment(run.augmentation) if run.augmentation else _augment(resolved)
    context.console.say(*notes, f"{run.where}: {len(train[1])} training samples, {len(held_out[1])} held out.")
    task = Supervised(
        OwnConfig(run.where, {"name": part_name(run.model)}, run.parts()),
        run.model,
        run.loss or F.cross_entropy,
        OwnSamples(*train, preprocessing, augment, resolved.seed),
        OwnSamples(*held_out, preprocessing),
        preprocessing,
        resolved,
        context,
    )
    return task, resolved


def _for_modules(recipe: Recipe) -> Recipe:
    """A recipe with the fields that apply to any module: duration, optimizer, schedule, and crops of images."""
    # Fields such as drop_path or mixup concern our networks and losses: they are left out, not ignored in silence.
    types = setting_types(OwnOptions)
    fields = {name: value for name, value in recipe.to_json().items() if name in types}
    sources = {name: source for name, source in recipe.sources.items() if name in types}
    return Recipe.of(OwnOptions, name=recipe.name, summary=recipe.summary, sources=sources, **fields)


Part = tuple[Any, list[int]]  # a dataset, and the indices of it that belong to the part


def _data(run: OwnRun) -> tuple[Part, Part]:
    """What to learn from, and what to hold out."""
    if not is_dataset(run.data):
        source = open_source(run.data, run.labels)
        split = split_source(source, run.splits)
        parts = (SourceData(source, split.train), SourceData(source, split.held_out))
        # The source has split its images already: all indices of either part belong to it.
        train, held_out = ((part, list(range(len(part)))) for part in parts)
        return train, held_out
    if run.validation is not None:
        return (run.data, list(range(len(run.data)))), (run.validation, list(range(len(run.validation))))
    kept, held = split_indices(len(run.data), run.splits)
    return (run.data, kept), (run.data, held)


def _preprocessing(module: nn.Module, recipe: Recipe) -> Preprocessing:
    """How images that are not tensors are prepared: as the module says, or as for ImageNet."""
    own = getattr(module, "preprocessing", None)
    if not isinstance(own, Preprocessing):
        side = recipe.resolution or 224
        own = default_preprocessing("deit", (side, side), 3)
    return dataclasses.replace(own, crop_ratio=recipe.test_crop_ratio, interpolation=recipe.interpolation)


def _augment(recipe: Recipe) -> Augment:
    return Augment(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augment)})


def part_name(part: Any) -> str:
    """A name for a module, a function or a dataset, for people."""
    named = inspect.isfunction(part) or inspect.isclass(part)
    return str(part.__name__ if named else type(part).__name__)
