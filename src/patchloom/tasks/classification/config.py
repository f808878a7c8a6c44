"""What a classifier learns from what: data, model, the weights it starts from, and its teachers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from patchloom.data.splits import Splits
from patchloom.errors import PatchloomError, check_choice
from patchloom.models.config import Config
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import config_from_json
from patchloom.models.roles import TUNINGS
from patchloom.recipes.networks import network_config
from patchloom.recipes.recipe import Recipe
from patchloom.text import with_tuples

Method = Literal["hard", "soft", "token"]
METHODS: tuple[Method, ...] = ("hard", "soft", "token")
KL_FORMS = ("paper", "published")


@dataclass(frozen=True)
class Start:
    """Weights that a run starts from, instead of random ones."""

    weights: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None  # None: the head is for other classes, and starts from scratch
    hints: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the file does not say: heads=3
    tune: str = "all"  # one of TUNINGS
    delta: bool = False  # export what changed, too

    def __post_init__(self) -> None:
        check_choice("--tune", self.tune, TUNINGS)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Start:
        names = values["class_names"]
        own = {"preprocessing": Preprocessing.from_json(values["preprocessing"]), "class_names": names and tuple(names)}
        return cls(**{**values, **own})


@dataclass(frozen=True)
class DistillationConfig:
    """The teachers, and the form of distillation (thesis 3.3)."""

    teachers: tuple[str, ...]
    method: Method | None = None  # None: decided by the student's family
    weight: float | None = None  # of the teacher's term; None: 0.1 for soft (lambda), 0.5 for hard and token
    tau: float = 3.0  # temperature of soft distillation
    kl: str = "paper"  # "published": the other direction, divided by the number of classes too
    cache: str | None = None  # folder for the teachers' logits
    hints: dict[str, Any] = dataclasses.field(default_factory=dict)  # what their files do not say: heads, mean, std

    def __post_init__(self) -> None:
        if self.cache is not None:
            # Absolute, because a run may be resumed from another folder. The class is frozen, hence object.__setattr__.
            object.__setattr__(self, "cache", str(Path(self.cache).absolute()))
        if self.method is not None:
            check_choice("--method", self.method, METHODS)
        check_choice("--kl", self.kl, KL_FORMS)
        if not self.teachers:
            raise PatchloomError("Distillation needs a teacher.")
        for name, value in (("tau", self.tau), ("weight", self.weight)):
            if not isinstance(value, int | float) and not (name == "weight" and value is None):
                raise PatchloomError(f"{name} of distillation is a number, not {value!r}.")
        if not self.tau > 0 or not 0 <= self.share <= 1:
            raise PatchloomError(
                f"The temperature is above 0 and the weight of the teacher between 0 and 1, not {self.tau} and "
                f"{self.weight}."
            )

    @property
    def share(self) -> float:
        """The weight of the teacher's term; the labels have the rest."""
        return self.weight if self.weight is not None else 0.1 if self.method == "soft" else 0.5

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DistillationConfig:
        """Version 0.1 wrote the method as `how`."""
        method = values.get("method", values.get("how"))
        kept = {key: value for key, value in values.items() if key != "how"}
        return cls(**{**kept, "teachers": tuple(values["teachers"]), "method": method})


@dataclass(frozen=True)
class ClassificationConfig:
    """Data, model and where the training starts.

    `train`, `distill` and `finetune` differ in which of `start` and `distillation` are set; a fine-tuning with a
    teacher has both.
    """

    data: str
    labels: str | None
    model: Config  # before the data's classes are known
    model_options: dict[str, Any]
    start: Start | None = None
    distillation: DistillationConfig | None = None
    scales_from: str | None = None  # a model whose learned scales a fresh network begins with
    splits: Splits = dataclasses.field(default_factory=Splits)

    @property
    def label(self) -> str:
        return "distill" if self.distillation else "finetune" if self.start else "classify"

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "labels": self.labels,
            **self.splits.to_json(),
            "model": self.model.to_json(),
            "model_options": self.model_options,
            "start": self.start and dataclasses.asdict(self.start),
            # The key is "teaching" for the sake of run folders that version 0.1 wrote.
            "teaching": self.distillation and dataclasses.asdict(self.distillation),
            "scales_from": self.scales_from,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClassificationConfig:
        start, teaching = values.get("start"), values.get("teaching")
        return cls(
            values["data"],
            values["labels"],
            config_from_json(values["model"]),
            with_tuples(values["model_options"]),
            start=start and Start.from_json(start),
            distillation=teaching and DistillationConfig.from_json(teaching),
            scales_from=values.get("scales_from"),
            splits=Splits.from_json(values),
        )

    def network_config(self, recipe: Recipe, num_classes: int) -> Config:
        """The config of the network, as the recipe trains it."""
        return network_config(self.model, recipe, num_classes, self.model_options)


def upgrade_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the fields that earlier versions did not record, as those versions understood them."""
    if "scale" in values:
        return values
    model = values["model"]
    scale = values["model_options"].get("scale", model.get("scale"))
    # In such settings, a recipe's layerscale alone decided whether the branches of a ViT were scaled.
    if scale == "none" and model.get("family") == "vit" and values.get("layerscale") is not None:
        scale = "layerscale"
    changed: dict[str, Any] = {"scale": scale}
    if scale not in (None, "layerscale"):
        changed["layerscale"] = None
    if not values.get("schedule_published"):
        changed["min_lr"] = min(values["min_lr"], values["lr"])
    return {**values, **changed}


def absolute_place(source: str | PathLike[str]) -> str:
    """An absolute path, so that a run is resumed from any folder; any other name as it is."""
    if not isinstance(source, str | PathLike):
        raise PatchloomError(
            f"A folder, a file or the name of another source is expected, not {type(source).__name__}."
        )
    if not str(source):  # Path("") would be the current folder
        raise PatchloomError("An empty name was given where a folder, a file or another source is expected.")
    path = Path(source)
    return str(path.absolute()) if str(source) != "digits" and path.exists() else str(source)


def teacher_place(source: str | PathLike[str]) -> str:
    """The same for a teacher, whose file may stand in timm:NAME:FILE."""
    scheme, name, file = [*str(source).split(":", 2), "", ""][:3]
    return f"timm:{name}:{absolute_place(file)}" if scheme == "timm" and file else absolute_place(source)
