"""A job: all that decides a run, as plain values. recipe.yaml holds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from patchloom.data.splits import Splits
from patchloom.errors import PatchloomError
from patchloom.models.config import Config
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import config_from_json, find_config
from patchloom.models.roles import TUNINGS
from patchloom.recipes.changes import apply_changes, as_built, keep_scales, network_config
from patchloom.recipes.cited import cite
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import find_recipe
from patchloom.recipes.transfer import official_splits
from patchloom.training.checkpoints import parse_interval

How = Literal["hard", "soft", "token"]
HOWS: tuple[How, ...] = ("hard", "soft", "token")
KL_FORMS = ("paper", "published")


@dataclass(frozen=True)
class Start:
    """Weights that a run starts from, instead of random ones."""

    weights: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None  # None: the head is for other classes, and starts afresh
    hints: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the file does not say: heads=3
    tune: str = "all"  # one of TUNINGS
    delta: bool = False  # export what changed, too

    def __post_init__(self) -> None:
        if self.tune not in TUNINGS:
            raise PatchloomError(f"--tune is one of {', '.join(TUNINGS)}, not {self.tune!r}.")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Start:
        names = values["class_names"]
        own = {"preprocessing": Preprocessing.from_json(values["preprocessing"]), "class_names": names and tuple(names)}
        return cls(**{**values, **own})


@dataclass(frozen=True)
class Teaching:
    """Who teaches, and how (thesis 3.3)."""

    teachers: tuple[str, ...]
    how: How | None = None  # None: decided by the student's family
    weight: float | None = None  # of the teacher's term; None: 0.1 for soft (lambda), 0.5 for hard and token
    tau: float = 3.0  # temperature of soft distillation
    kl: str = "paper"  # "published": the other direction, divided by the number of classes too
    cache: str | None = None  # folder for what the teachers say
    hints: dict[str, Any] = dataclasses.field(default_factory=dict)  # what their files do not say: heads, mean, std

    def __post_init__(self) -> None:
        if self.cache is not None:
            object.__setattr__(self, "cache", str(Path(self.cache).absolute()))
        if self.how not in (None, *HOWS):
            raise PatchloomError(f"--how is one of {', '.join(HOWS)}, not {self.how!r}.")
        if self.kl not in KL_FORMS:
            raise PatchloomError(f"--kl is one of {', '.join(KL_FORMS)}, not {self.kl!r}.")
        if not self.teachers:
            raise PatchloomError("Distillation needs a teacher.")
        if not self.tau > 0 or not 0 <= self.share <= 1:
            raise PatchloomError(
                f"The temperature is above 0 and the weight of the teacher between 0 and 1, not {self.tau} and "
                f"{self.weight}."
            )

    @property
    def share(self) -> float:
        """The weight of the teacher's term; the labels have the rest."""
        return self.weight if self.weight is not None else 0.1 if self.how == "soft" else 0.5

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Teaching:
        return cls(**{**values, "teachers": tuple(values["teachers"])})


@dataclass(frozen=True)
class Job:
    """What is trained on what, and how."""

    data: str
    labels: str | None
    config: Config  # before the data's classes are known
    options: dict[str, Any]
    recipe: Recipe
    notes: tuple[str, ...] = ()
    start: Start | None = None
    teaching: Teaching | None = None
    scales_from: str | None = None  # whose learned scales a fresh network begins with
    splits: Splits = dataclasses.field(default_factory=Splits)

    @property
    def task(self) -> str:
        return "distill" if self.teaching else "finetune" if self.start else "classify"

    def settings(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "data": self.data,
            "labels": self.labels,
            "train_split": self.splits.train,
            "test_split": self.splits.test,
            "hold_out": self.splits.hold_out,
            "model": self.config.to_json(),
            "model_options": self.options,
            "start": self.start and dataclasses.asdict(self.start),
            "teaching": self.teaching and dataclasses.asdict(self.teaching),
            "scales_from": self.scales_from,
            **{f"recipe_{key}" if key == "name" else key: value for key, value in self.recipe.to_json().items()},
        }

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> Job:
        known = {item.name for item in dataclasses.fields(Recipe)}
        fields = {key: value for key, value in _as_now(values).items() if key in known}
        start, teaching = values.get("start"), values.get("teaching")
        return cls(
            values["data"],
            values["labels"],
            config_from_json(values["model"]),
            {key: tuple(v) if isinstance(v, list) else v for key, v in values["model_options"].items()},
            Recipe(name=values["recipe_name"], **fields),
            start=start and Start.from_json(start),
            teaching=teaching and Teaching.from_json(teaching),
            scales_from=values.get("scales_from"),
            splits=Splits(values.get("train_split"), values.get("test_split"), values.get("hold_out")),
        )

    def network_config(self, num_classes: int) -> Config:
        return network_config(self.config, self.recipe, num_classes, self.options)


def _as_now(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the fields that earlier versions did not record, as those versions understood them."""
    if "scale" in values:
        return dict(values)
    model = values["model"]
    scale = values["model_options"].get("scale", model.get("scale"))
    if scale == "none" and model.get("family") == "vit" and values.get("layerscale") is not None:
        scale = "layerscale"
    changed: dict[str, Any] = {"scale": scale}
    if scale not in (None, "layerscale"):
        changed["layerscale"] = None
    if not values.get("schedule_published"):
        changed["min_lr"] = min(values["min_lr"], values["lr"])
    return {**values, **changed}


def plan_job(
    data: str | PathLike[str],
    model: str | Config,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    options: Mapping[str, Any],
    labels: str | None = None,
    start: Start | None = None,
    teaching: Teaching | None = None,
    scales_from: str | PathLike[str] | None = None,
    splits: Splits | None = None,
) -> Job:
    """Resolve names and changes; nothing is read or written."""
    config, options = find_config(model) if isinstance(model, str) else model, dict(options)
    if teaching:
        teaching = _resolve_teaching(teaching, config, options, start)
        options |= {"distilled": True} if teaching.how == "token" else {}
    resolved, notes = _resolve_recipe(recipe, config, options, changes, start is not None)
    if options.get("scale_form") == "published" and resolved.warmup_epochs and "warmup_epochs" not in changes:
        source = "ReZero, SkipInit, Fixup and T-Fixup were published without warm-up"
        notes.append(f"warmup_epochs 0: {source}.")
        resolved = cite(resolved, warmup_epochs=(0.0, source))
    if start is not None:
        start = dataclasses.replace(start, tune=resolved.tune)
    network = network_config(config, resolved, 2, options)  # refuses what cannot be built
    scales = None if scales_from is None else place(scales_from)
    if scales and options.get("scale_init", "constant") != "constant":
        raise PatchloomError("model.scale_init and --scales-from both set the start of the scales: give one.")
    resolved = as_built(resolved, network, changes, start is not None, scales)
    chosen_splits = official_splits(str(data), resolved.name, splits or Splits())
    return Job(place(data), labels, config, options, resolved, tuple(notes), start, teaching, scales, chosen_splits)


def _resolve_recipe(
    recipe: str | Recipe, config: Config, options: Mapping[str, Any], changes: Mapping[str, Any], trained: bool
) -> tuple[Recipe, list[str]]:
    """The recipe for a model of this size, with changes; `trained`: for weights, whose scales stay what they are."""
    deciding = ("dim", "depth", "branches", "patch_size")
    sized = config.replace(**{name: options[name] for name in deciding if name in options})
    chosen = find_recipe(recipe, sized) if isinstance(recipe, str) else recipe
    if chosen.resolution is not None and config.img_size[0] < 224 and "resolution" not in changes:
        chosen = chosen.replace(resolution=None)  # a model for small images keeps its size
    resolved, notes = apply_changes(keep_scales(chosen) if trained else chosen, changes, sized)
    parse_interval(resolved.checkpoint_every)
    if trained:
        return resolved, notes
    if changes.get("tune", "all") != "all":
        raise PatchloomError(f"tune={resolved.tune} is for `finetune`: a fresh network trains all of its parameters.")
    if "finetune" in resolved.name or "_to_1k" in resolved.name:
        notes.append(
            f"{resolved.name} is made for weights that are trained already; here the network starts at random."
        )
    return resolved.replace(tune="all"), notes


def _resolve_teaching(teaching: Teaching, config: Config, options: Mapping[str, Any], start: Start | None) -> Teaching:
    """With the method: by default DeiT distils through its token (thesis 3.3), CaiT (supplement A.3), ResMLP and the
    others from hard labels."""
    if teaching.how is None:
        own = getattr(config, "distilled", False) or (start is None and config.family == "deit")
        teaching = dataclasses.replace(teaching, how="token" if options.get("distilled", own) else "hard")
    if teaching.how == "token" and options.get("distilled") is False:
        raise PatchloomError("--how token needs a distillation token: remove model.distilled=false.")
    return teaching


def place(source: str | PathLike[str]) -> str:
    """A path from anywhere, so that a run is resumed from anywhere; any other name as it is."""
    if not str(source):  # Path("") would be the current folder
        raise PatchloomError("An empty name was given where a folder, a file or another source is expected.")
    path = Path(source)
    return str(path.absolute()) if str(source) != "digits" and path.exists() else str(source)


def teacher_place(source: str | PathLike[str]) -> str:
    """The same for a teacher, whose file may stand in timm:NAME:FILE."""
    scheme, name, file = [*str(source).split(":", 2), "", ""][:3]
    return f"timm:{name}:{place(file)}" if scheme == "timm" and file else place(source)
