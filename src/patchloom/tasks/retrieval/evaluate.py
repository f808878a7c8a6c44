"""`evaluate` and `predict` for Grafit's models: classification by the nearest labelled images (2.3.3, Eq. 2.6)."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.inference import predict as classes
from patchloom.inference.embeddings import embeddings
from patchloom.inference.items import RunSplit, held_out_by, open_items
from patchloom.inference.models import Model, open_fused, open_model
from patchloom.inference.neighbours import SIGMA, choose_k, knn_probabilities, normalise
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.tasks.retrieval.config import NO_LABELS
from patchloom.tasks.retrieval.images import labels_of
from patchloom.tasks.retrieval.metrics import knn_accuracy
from patchloom.training.run import Run

Place = str | PathLike[str]


def evaluate(
    model: Model,
    data: Place,
    *,
    labels: str | None = None,
    split: str | None = None,
    k: int | None = None,
    batch: int = 128,
    workers: int = 0,
    strict: bool = False,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """The accuracy of classifying held-out images by the `k` nearest training images: {count, knn, k, collection,
    labels}. `labels` is any column, by default the one that the model was trained on; `k` is by default chosen by
    leaving every training image out in turn. `patchloom search evaluate` also ranks."""
    if split in ("train", "all"):
        raise PatchloomError(
            f"--split {split} cannot be evaluated: the training images are the collection, and each would find itself."
        )
    network, run = open_fused(model, device=device), held_out_by(model, data)
    column = labels or network.label_column
    source, queries = open_items(data, column, split, run, strict, workers, console)
    items = _training_images(source, split, run)
    x, z = (_embed(network, source, part, batch, workers) for part in (items, queries))
    y, truth = labels_of(items), labels_of(queries)
    chosen = _neighbours(k, x, y)
    return {
        "count": len(queries),
        "knn": knn_accuracy(z, truth, x, y, chosen),
        "k": chosen,
        "collection": len(items),
        "labels": column,
    }


def _training_images(source: Source, split: str | None, run: RunSplit | None) -> list[Item]:
    """Those that the run trained on, where the data has its splits; else the training split."""
    named = run.fitted(source) if split is None and run is not None else "train"
    return open_items(source, None, named, run)[1]


def _embed(network: Network, source: Source, items: Sequence[Item], batch: int, workers: int) -> Tensor:
    return normalise(embeddings(network, source, items, network.preprocessing, batch, workers))


def _neighbours(k: int | None, vectors: Tensor, labels: Tensor) -> int:
    if k is None:
        return choose_k(vectors, labels)[0]
    if not 1 <= k <= len(labels):
        raise PatchloomError(f"--k is from 1 to {len(labels)}, the number of training images, not {k}.")
    return k


class NeighbourClassifier(Network):
    """A network that classifies by the nearest of N labelled images: its logits are the logarithms of Eq. 2.6."""

    def __init__(self, network: Network, vectors: Tensor, labels: Tensor, names: tuple[str, ...], k: int) -> None:
        super().__init__()
        self.network, self.config, self.preprocessing = network, network.config, network.preprocessing
        self.class_names, self.vectors, self.labels, self.k = names, vectors, labels, k

    def forward(self, images: Tensor) -> Tensor:
        """(B, classes); -inf for a class that no neighbour has."""
        queries = normalise(self.network.embed(images)).cpu()
        classes = len(self.class_names or ())
        return knn_probabilities(queries, self.vectors, self.labels, self.k, SIGMA, classes).log()


def predict(
    model: Model,
    inputs: Any,
    *,
    collection: Place | None = None,
    labels: str | None = None,
    k: int | None = None,
    top: int = 5,
    device: Device = "auto",
) -> list[dict[str, Any]]:
    """For each image {path, predictions: [{class, probability}]} or {path, error}, as of a classifier.

    The probabilities are those of Eq. 2.6 over the labelled images of `collection`, by default those that the run was
    trained on, for the classes of the column `labels`, by default the run's. A network that was trained with
    cross-entropy needs no collection: without one the probabilities are its own.
    """
    network = open_model(model, device=device)
    if collection is None and labels is None and getattr(network, "head", None) is not None:
        return classes.predict(network, inputs, top=top)
    with torch.inference_mode():
        classifier = _classifier(model, fuse(network), collection, labels, k)
    return classes.predict(classifier, inputs, top=top)


def _classifier(
    model: Model, network: Network, collection: Place | None, labels: str | None, k: int | None
) -> NeighbourClassifier:
    settings = _run_settings(model)
    data = settings.get("data") if collection is None else collection
    if data is None:
        raise PatchloomError(
            f"{model} is not in a run folder: --collection DATA gives labelled images to compare with."
        )
    column = labels or network.label_column
    if column is None and settings.get("labels") == NO_LABELS:
        raise PatchloomError("The model was trained without labels: --labels COLUMN names those to predict.")
    run = held_out_by(model, data)
    source = open_source(data, column)
    items = _training_images(source, None, run)
    vectors, y = _embed(network, source, items, 128, 0), labels_of(items)
    return NeighbourClassifier(network, vectors, y, source.class_names, _neighbours(k, vectors, y))


def _run_settings(model: Model) -> dict[str, Any]:
    """The settings of the run that a model comes from; empty for other files."""
    if isinstance(model, str | PathLike):
        place = Path(model).resolve()
        for folder in (place, *place.parents[:2]):
            if (folder / "recipe.yaml").is_file():
                return Run.open(folder).settings
    return {}
