"""Analyses of models, independent of single images: scales, sparsity, branch norms, embeddings, agreement."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.console import Console
from patchloom.data.images import to_batch
from patchloom.data.sources import Item, Source, spread
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.explaining.weights import scales, sparsity
from patchloom.inference.embeddings import embeddings
from patchloom.inference.items import open_items
from patchloom.inference.models import open_model
from patchloom.inference.norms import branch_norms
from patchloom.inference.projections import pca_energy, tsne
from patchloom.models.network import Network
from patchloom.models.patch_network import patch_network
from patchloom.tasks.classification.agreement import disagreement
from patchloom.tasks.classification.task import NORM_IMAGES
from patchloom.training.run import Run

EMBEDDED = 500  # default number of images to embed, evenly spread over the data: t-SNE is slow
LEAST = 8  # images needed for an analysis of embeddings

From = str | PathLike[str]


def analyse(
    models: Sequence[From],
    data: From | None = None,
    *,
    labels: str | None = None,
    split: str | None = None,
    count: int | None = None,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """Analyse models; returns plain JSON.

    `models` has one entry per model with its name, scales and sparsity, and norms_by_epoch if its run logged them;
    with `data` also branch_norms and embeddings (PCA energy, t-SNE). `disagreement` compares several models on `data`.

    At most `count` images (default: 500), evenly spread over the data, are embedded; embeddings.count is their number.
    Raises PatchloomError if `data` is missing or has too few images.
    """
    if count is not None and (data is None or count < LEAST):
        raise PatchloomError(
            "--count requires --data." if data is None else f"--count must be at least {LEAST}, not {count}."
        )
    if len(models) > 1 and data is None:
        raise PatchloomError(f"Comparing {len(models)} models needs images. Pass them with --data DATA.")
    source, items = open_items(data, labels, split, console=console) if data is not None else (None, [])
    found: dict[str, Any] = {"models": {}}
    for model in models:
        network = patch_network(open_model(model, device=device))
        entry: dict[str, Any] = {"model": network.config.name, "scales": scales(network), "sparsity": sparsity(network)}
        if logged := _logged_norms(model):
            entry["norms_by_epoch"] = logged
        if source is not None:
            entry["branch_norms"] = _norms(network, source, items)
            entry["embeddings"] = _embeddings(network, source, items, count or EMBEDDED)
        found["models"][str(model)] = entry
    if len(models) > 1 and data is not None:
        found["disagreement"] = disagreement(models, data, labels=labels, split=split, device=device)
    return found


def _logged_norms(model: From) -> list[dict[str, Any]]:
    """[{epoch, norms}] of a run that was trained with log_norms=true."""
    try:
        records = Run.open(Path(model)).records()
    except PatchloomError:
        return []
    rows = [row for row in records if row.get("event") == "epoch" and "branch_norms" in row]
    return [{"epoch": row["epoch"], "norms": row["branch_norms"]} for row in rows]


def _norms(network: Network, source: Source, items: Sequence[Item]) -> dict[str, float]:
    """The norm of each branch relative to its input, on NORM_IMAGES images."""
    pictures = [source.picture(item) for item in spread(items, NORM_IMAGES)]
    return branch_norms(network, to_batch(pictures, network.preprocessing, next(network.parameters()).device))


def _embeddings(network: Network, source: Source, items: Sequence[Item], count: int) -> dict[str, Any]:
    chosen = spread(items, count)
    if len(chosen) < LEAST:
        raise PatchloomError(
            f"An analysis of embeddings needs at least {LEAST} images; {source.where} has {len(chosen)}."
        )
    # float64: squared singular values span many orders of magnitude.
    vectors = embeddings(network, source, chosen, network.preprocessing).astype(np.float64)
    return {
        "count": len(chosen),
        "labels": [source.class_names[item.label] for item in chosen],
        "pca_energy": pca_energy(vectors).tolist(),
        "tsne": tsne(vectors).tolist(),
    }
