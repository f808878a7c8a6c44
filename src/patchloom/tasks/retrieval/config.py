"""What a Grafit run learns from what: data, label column, trunk, and where the labels of ClusterFit come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchloom.data.splits import Splits
from patchloom.models.config import Config
from patchloom.models.registry import config_from_json
from patchloom.recipes.networks import network_config
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.config import Start
from patchloom.text import with_tuples

NO_LABELS = "none"  # value of --labels


@dataclass(frozen=True)
class RetrievalConfig:
    """`labels` is a column; None: the only one of the data; "none": no labels are used."""

    data: str
    labels: str | None
    model: Config  # the trunk, before the recipe and the options
    model_options: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None  # weights of the trunk
    clusters_from: str | None = None  # the network whose vectors are clustered
    splits: Splits = field(default_factory=Splits)

    @property
    def label(self) -> str:
        return "grafit"

    @property
    def labelled(self) -> bool:
        return self.labels != NO_LABELS

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "labels": self.labels,
            **self.splits.to_json(),
            "model": self.model.to_json(),
            "model_options": self.model_options,
            "start": self.start and dataclasses.asdict(self.start),
            "clusters_from": self.clusters_from,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RetrievalConfig:
        start = values.get("start")
        return cls(
            values["data"],
            values["labels"],
            config_from_json(values["model"]),
            with_tuples(values["model_options"]),
            start and Start.from_json(start),
            values.get("clusters_from"),
            Splits.from_json(values),
        )

    def trunk_config(self, recipe: Recipe) -> Config:
        """The trunk as the recipe trains it; its head is taken away, so it has one class."""
        config = network_config(self.model, recipe, 1, self.model_options)
        return config.replace(head="linear") if getattr(config, "head", "linear") != "linear" else config
