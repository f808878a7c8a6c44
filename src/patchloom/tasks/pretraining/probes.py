"""Probes of the current network: how well its frozen embeddings classify, where the data has labels.

kNN: the 20 nearest training images by cosine vote with exp(cosine / 0.07), as DINO does. Linear: logistic regression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from patchloom.data.sources import Source, spread
from patchloom.data.splits import Split
from patchloom.inference.probes import TEMPERATURE, linear_probabilities
from patchloom.models.preprocessing import Preprocessing
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.retrieval.images import labels_of
from patchloom.tasks.retrieval.metrics import embed_items, knn_accuracy
from patchloom.training.processes import Processes

KNN, LINEAR = "knn", "linear"
_MOST = 10_000  # training images that a probe learns from: a few seconds, whatever the size of the data
_NAMES = {KNN: "kNN", LINEAR: "linear"}


class Probes:
    """Accuracy on the held-out images of what the training images' embeddings and labels tell."""

    def __init__(self, source: Source, split: Split, recipe: Recipe, processes: Processes) -> None:
        self.source, self.recipe, self.processes = source, recipe, processes
        measured = source.labelled and bool(split.held_out) and recipe.probe_every > 0
        self.items = spread(split.train, _MOST) if measured else []
        self.queries = split.held_out if measured else []

    def due(self, step: int, steps_per_epoch: int, total: int) -> bool:
        """Whether to probe after `step`: at the start, every `probe_every` epochs and at the end."""
        if not self.items:
            return False
        return step % (self.recipe.probe_every * steps_per_epoch) == 0 or step == total

    def measure(
        self, network: Any, preprocessing: Preprocessing, after_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """{"knn": accuracy, "linear": accuracy}, the same in every process; `network` is in evaluation mode."""
        recipe, processes = self.recipe, self.processes
        x, z = (
            embed_items(
                network, self.source, items, preprocessing, batch=max(64, recipe.batch_size // processes.count),
                workers=recipe.workers, processes=processes, after_batch=after_batch,
            )
            for items in (self.items, self.queries)
        )  # fmt: skip
        y, truth = labels_of(self.items), labels_of(self.queries)
        # A fit takes seconds: one process does it for all.
        found = self._accuracies(x, y, z, truth) if processes.is_main_process else None
        return processes.gather(found)[0]

    def _accuracies(self, x: Tensor, y: Tensor, z: Tensor, truth: Tensor) -> dict[str, float]:
        found = {KNN: knn_accuracy(z, truth, x, y, self.recipe.neighbours, TEMPERATURE)}
        classes = len(self.source.class_names)
        # scikit-learn is an extra; its regression chooses its decay on a fifth of the images.
        if find_spec("sklearn") is not None and len(y) >= 10 and len(set(y.tolist())) > 1:
            predicted = linear_probabilities(x.numpy(), y.numpy(), z.numpy(), classes).argmax(axis=1)
            found[LINEAR] = float((predicted == truth.numpy()).mean())
        return found

    @staticmethod
    def text(found: Mapping[str, float]) -> str:
        """The accuracies for people."""
        return ", ".join(f"{_NAMES[name]} {value:.2%}" for name, value in found.items())
