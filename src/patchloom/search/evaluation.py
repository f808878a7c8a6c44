"""Measure rankings: held-out images are the queries, training images the collection, images of one class relevant."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from patchloom.console import Console
from patchloom.data.images import to_input
from patchloom.data.loader import eval_batches
from patchloom.data.scan import report_skipped, scan
from patchloom.data.sources import Item, Source
from patchloom.devices import Device, device_of, pins_memory
from patchloom.errors import PatchloomError, check_choice
from patchloom.inference.embeddings import embeddings
from patchloom.inference.items import choose_items, held_out_by
from patchloom.inference.models import Model
from patchloom.inference.neighbours import KS, Nearest, choose_k, nearest, normalise, vote
from patchloom.inference.ranking import Level, rank
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.search.columns import Labels, column_list, conflicts, labels_of, open_labelled
from patchloom.search.conditions import Ranking, classifies, coarse_column, softmax_of
from patchloom.search.storage import Column
from patchloom.search.weights import open_weights

CONDITIONS = ("none", "coarse", "oracle")


def evaluate_search(
    weights: Model,
    data: str | PathLike[str] | Any,
    labels: Labels = None,
    *,
    condition: str = "none",
    coarse: str | None = None,
    k: int | None = None,
    hints: Mapping[str, Any] | None = None,
    batch: int = 128,
    workers: int = 0,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """mAP over whole rankings and kNN accuracy, for every label column.

    The queries are the images that the run held out, or the data's own held-out split, and the collection is what
    training uses; no query is in it. An image is relevant if it has the label of the query; a query whose class the
    collection lacks counts as 0. The condition changes the ranking, not the neighbours of kNN (Table 2.7).

    condition   "none": cosine; "coarse": Eq. 2.5 with the network's softmax over the coarse column if it classifies
                it, else Eq. 2.6 of its neighbours; "oracle": images of the query's coarse class first
    coarse      the coarse column; by default the one that the network was trained on
    k           neighbours for kNN; by default chosen by leave-one-out on the collection, for each column

    Returns:
        {"condition", "levels": {column: {"map", "knn", "k", "queries", "collection"}}}, fractions of 1
    """
    check_choice("--condition", condition, CONDITIONS)
    console = console or Console(quiet=True)
    network = open_weights(weights, hints, device)
    source, above = _open(data, column_list(labels), network, condition, coarse)
    for message in (*source.notes, *conflicts(source)):
        console.say(f"Note: {message}")
    collection, queries = sides(source, weights, data, console)
    if k is not None and not 1 <= k <= len(collection):
        raise PatchloomError(f"-k must be between 1 and {len(collection)}, the images of the collection, not {k}.")
    fast = fuse(network)
    x, z = (
        normalise(embeddings(fast, source, items, network.preprocessing, batch, workers))
        for items in (collection, queries)
    )
    known, truth = labels_of(source, collection), labels_of(source, queries)
    ranking = Ranking()
    if above is not None:
        odds = _coarse_probabilities(fast, source, queries, known[above], x, z, batch, workers)
        ranking = (
            Ranking.by_probabilities(known[above].labels, odds)
            if condition == "coarse"
            else Ranking(known[above].labels, known=truth[above].labels)
        )
    asked = column_list(labels) or list(source.columns)
    levels = {name: Level(truth[name].labels, known[name].labels) for name in asked}
    most = min(len(x), max(*KS, k or 1))
    precisions, near = rank(
        z, x, levels, None if above is None else ranking.scores, most,
        lambda done: console.progress(f"ranking: {done} of {len(z)} queries"),
    )  # fmt: skip
    return {
        "condition": condition,
        **({} if above is None else {"coarse": above}),
        "levels": {
            name: {
                "map": float(precisions[name].mean()),
                **_knn(near, x, known[name], truth[name], k),
                "queries": len(queries),
                "collection": len(collection),
            }
            for name in asked
        },
    }


def _open(
    data: Any, asked: list[str], network: Network, condition: str, coarse: str | None
) -> tuple[Source, str | None]:
    """The images with the columns asked for and, under a condition, the coarse one."""
    source = open_labelled(data, asked or None)
    if not source.columns:
        raise PatchloomError(f"{source.where} needs --labels COLUMN: an image is relevant if it has the same label.")
    if condition == "none":
        return source, None
    trained = getattr(network, "label_column", None)
    for more in (coarse, trained):
        if more is not None and more not in source.columns:
            source = open_labelled(data, [*asked, more])
            break
    names = source.columns
    return source, coarse_column(names, trained, network.class_names, coarse)


def sides(source: Source, weights: Model, data: Any, console: Console) -> tuple[list[Item], list[Item]]:
    """The collection and the queries, without images that cannot be read."""
    bad = scan(source, source.items(), console)
    if bad:
        report_skipped(bad, console, strict=False)
    readable = source.without(bad)
    run = held_out_by(weights, data)
    queries, of_queries = choose_items(readable, None, run)
    trained = run.trained(readable) if run is not None else None
    collection, of_collection = choose_items(readable, trained or "train", run)
    tested = {item.key for item in queries}
    collection = [item for item in collection if item.key not in tested]
    for what, items in (("queries", queries), ("images in the collection", collection)):
        if not items:
            raise PatchloomError(f"{source.where} has no {what}: it needs a training and a held-out split.")
    console.say(f"{len(queries)} queries: {of_queries}. {len(collection)} images in the collection: {of_collection}.")
    return collection, queries


def _coarse_probabilities(
    network: Network, source: Source, queries: list[Item], column: Column, x: Any, z: Any, batch: int, workers: int
) -> Any:
    """(Q, classes): the softmax of a network that classifies the coarse column, else the votes of the neighbours."""
    import torch

    if classifies(network, column.names):
        preprocessing, device = network.preprocessing, device_of(network)
        batches = eval_batches(source, range(len(queries)), queries, preprocessing, batch, workers, pins_memory(device))
        rows = [softmax_of(network, to_input(images, preprocessing, device), column.names) for images, _ in batches]
        return torch.cat(rows)
    k = choose_k(x, column.labels)[0]
    return vote(nearest(z, x, min(k, len(x))), column.labels, k, len(column.names))


def _knn(near: Nearest, x: Any, known: Column, truth: Column, k: int | None) -> dict[str, Any]:
    """Accuracy of the k nearest neighbours, and k."""
    chosen = choose_k(x, known.labels)[0] if k is None else k
    votes = vote(near, known.labels, chosen, len(known.names))
    return {"knn": float(np.mean(votes.argmax(dim=1).numpy() == truth.labels)), "k": chosen}
