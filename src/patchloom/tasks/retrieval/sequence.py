"""ClusterFit+ in one command: the baseline is trained first, and the clusters of its vectors are the labels (2.4.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from patchloom.data.opening import open_source
from patchloom.data.splits import Splits, split_source
from patchloom.errors import PatchloomError, check_place
from patchloom.recipes.changes import checked_options
from patchloom.recipes.grafit import CLUSTERFIT_PLUS, GRAFIT_BASELINE
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.config import absolute_place
from patchloom.tasks.retrieval.plans import Place, plan_grafit
from patchloom.tasks.spec import RunConfig


@dataclass(frozen=True)
class ClustersAfter:
    """The second run: the arguments of its plan, but for what it shares with the first."""

    model: str
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    folder: ClassVar[str] = "baseline"

    def check(self, first: RunConfig) -> RunConfig:
        """The second run without its clusters; refuses more clusters than images before hours of training."""
        plan = self._plan(first, None)
        source = first.opened.keep(open_source, first.task.data, first.task.labels)
        images = len(split_source(source, first.task.splits).train)
        if plan.recipe.clusters > images:
            raise PatchloomError(f"clusters={plan.recipe.clusters} is more than the {images} training images.")
        return plan

    def second(self, first: RunConfig, weights: Path) -> RunConfig:
        """The run on the clusters of the vectors of `weights`."""
        return self._plan(first, weights)

    def _plan(self, first: RunConfig, weights: Path | None) -> RunConfig:
        task = first.task
        return plan_grafit(
            task.data, self.model, self.recipe, self.changes, self.options, labels=task.labels, mean=self.mean,
            std=self.std, clusters_from=weights, splits=task.splits,
        )  # fmt: skip

    def describe(self) -> str:
        return "on clusters of the vectors of the first"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClustersAfter:
        colours = {name: values[name] and tuple(values[name]) for name in ("mean", "std")}
        return cls(**{**values, **colours})


def plan_runs(
    data: Place,
    model: Place,
    recipe: str | Recipe | None,
    changes: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    *,
    labels: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    clusters_from: Place | None = None,
    splits: Splits | None = None,
) -> RunConfig:
    """As `plan_grafit`. Of ClusterFit+ without `clusters_from`, the plan of its baseline, and after it ClusterFit+."""
    common: dict[str, Any] = {"labels": labels, "mean": mean, "std": std, "splits": splits}
    if clusters_from is not None or not isinstance(recipe, str) or not recipe.startswith(CLUSTERFIT_PLUS.name):
        plan = plan_grafit(data, model, recipe, changes, options, clusters_from=clusters_from, **common)
        if plan.recipe.clusters is not None and clusters_from is None:
            raise PatchloomError(
                f"{plan.recipe.name} learns clusters of another network's vectors: train one with --recipe "
                "grafit_baseline, and give its run as --clusters-from RUN."
            )
        return plan
    check_place("model", model)
    after = ClustersAfter(absolute_place(model), recipe, dict(changes), checked_options(options or {}), mean, std)
    # The first run is the baseline in the form of the second, small or not; it has no clusters.
    baseline = recipe.replace(CLUSTERFIT_PLUS.name, GRAFIT_BASELINE.name)
    kept = {name: value for name, value in changes.items() if name != "clusters"}
    return dataclasses.replace(plan_grafit(data, model, baseline, kept, options, **common), then=after)
