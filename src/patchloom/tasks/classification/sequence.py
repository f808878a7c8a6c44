"""Train low, finish high: after a run at low resolution, a short fine-tuning at a higher one (FixRes; thesis 6.3.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from patchloom.data.opening import open_source
from patchloom.recipes.networks import keep_scales
from patchloom.recipes.registry import find_recipe, finetuning_recipe
from patchloom.tasks.classification.plans import plan_finetuning, plan_training
from patchloom.tasks.spec import RunConfig


@dataclass(frozen=True)
class FinishHigh:
    """The second run: a higher resolution, and what it changes of its recipe, by default the family's own."""

    resolution: int
    changes: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None

    folder: ClassVar[str] = "low"

    def check(self, first: RunConfig) -> RunConfig:
        """The second run as it will be, before its weights are there; refuses what cannot be.

        Without this, a mistake in the second stage would be found after the hours of the first.
        """
        low = first.task
        images = len(first.opened.keep(open_source, low.data, low.labels).items())
        config = low.network_config(first.recipe, low.model.num_classes)
        recipe = find_recipe(self.recipe or finetuning_recipe(config.family, True, images), config)
        fitting = keep_scales(recipe)  # those of the first run
        plan = plan_training(low.data, config, fitting, self._settings(first), {}, low.labels, splits=low.splits)
        return dataclasses.replace(plan, notes=(), opened=first.opened)

    def second(self, first: RunConfig, weights: Path) -> RunConfig:
        """The second run, from the weights that the first has exported."""
        low = first.task
        return plan_finetuning(
            weights, low.data, self.recipe, self._settings(first), {}, labels=low.labels, splits=low.splits
        )

    def _settings(self, first: RunConfig) -> dict[str, Any]:
        # How a run is executed is inherited; how it is optimised is decided by the second recipe.
        kept = {name: getattr(first.recipe, name) for name in ("seed", "workers", "checkpoint_every", "shard")}
        return {**kept, **self.changes, "resolution": self.resolution}

    def describe(self) -> str:
        return f"at {self.resolution} pixels"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FinishHigh:
        return cls(**values)
