"""What a pre-training run learns from what: data, trunk, the weights it starts from, and a trained tokenizer."""

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
from patchloom.tasks.pretraining.tokenizers import TrainedTokenizer
from patchloom.text import with_tuples

LABEL = "pretrain"  # the value of `task` in recipe.yaml


@dataclass(frozen=True)
class PretrainingConfig:
    """`labels` is the column that probes measure by; None: the only one of the data, or none."""

    data: str
    labels: str | None
    model: Config  # the trunk, before the recipe and the options
    model_options: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None  # weights of the trunk
    tokenizer: TrainedTokenizer | None = None  # of BeiT
    splits: Splits = field(default_factory=Splits)

    @property
    def label(self) -> str:
        return LABEL

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "labels": self.labels,
            **self.splits.to_json(),
            "model": self.model.to_json(),
            "model_options": self.model_options,
            "start": self.start and dataclasses.asdict(self.start),
            "tokenizer": self.tokenizer and self.tokenizer.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PretrainingConfig:
        start, tokenizer = values.get("start"), values.get("tokenizer")
        return cls(
            values["data"],
            values["labels"],
            config_from_json(values["model"]),
            with_tuples(values["model_options"]),
            start and Start.from_json(start),
            tokenizer and TrainedTokenizer.from_json(tokenizer),
            Splits.from_json(values),
        )

    def trunk_config(self, recipe: Recipe) -> Config:
        """The trunk as the recipe trains it, without a head."""
        options = {**self._aggregation(recipe), **self.model_options}
        if recipe.stem is not None:
            options["stem"] = recipe.stem
        return network_config(self.model, recipe, 1, options).without_head()

    def _aggregation(self, recipe: Recipe) -> dict[str, Any]:
        """How the recipe wants the patches of a network aggregated; weights keep what they were trained with."""
        if recipe.aggregation is None or self.start is not None or not hasattr(self.model, "aggregation"):
            return {}
        # There is no place for a distillation token in an average.
        alone = {"distilled": False} if recipe.aggregation == "average" and hasattr(self.model, "distilled") else {}
        return {"aggregation": recipe.aggregation, **alone}
