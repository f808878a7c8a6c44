"""ClusterFit+ in one command: the baseline is trained first, and the clusters of its vectors are the labels (2.4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from patchloom.data.opening import open_source
from patchloom.errors import PatchloomError
from patchloom.recipes.grafit import CLUSTERFIT_PLUS, GRAFIT_BASELINE
from patchloom.tasks.retrieval.plans import plan_grafit
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
        images = len(first.opened.keep(open_source, first.task.data, first.task.labels).items())
        if plan.recipe.clusters > images:
            raise PatchloomError(f"clusters={plan.recipe.clusters} is more than the {images} images.")
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


def needs_clusters(recipe: Any, clusters_from: Any) -> bool:
    """Whether a recipe learns clusters that no network is given for."""
    return clusters_from is None and isinstance(recipe, str) and recipe.startswith(CLUSTERFIT_PLUS.name)


def baseline_of(recipe: str) -> str:
    """The recipe of the first run: that of the baseline, small if the second one is."""
    return recipe.replace(CLUSTERFIT_PLUS.name, GRAFIT_BASELINE.name)


def without_clusters(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that the first run takes."""
    return {name: value for name, value in changes.items() if name != "clusters"}
