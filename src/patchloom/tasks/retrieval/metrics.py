"""Embeddings of many images on any number of processes, and the accuracy of classification by neighbours (Eq. 2.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from patchloom.data.images import to_input
from patchloom.data.loader import eval_batches
from patchloom.data.sources import Item, Source
from patchloom.devices import pins_memory
from patchloom.inference.neighbours import SIGMA, knn_probabilities, normalise
from patchloom.models.preprocessing import Preprocessing
from patchloom.training.processes import Processes
from patchloom.training.task import Metric

KNN = Metric("knn", percent=True)


@torch.no_grad()  # not inference_mode: a sharded network keeps what its first forward pass gathers, and trains with it
def embed_items(
    network: Any,
    source: Source,
    items: Sequence[Item],
    preprocessing: Preprocessing,
    *,
    batch: int,
    workers: int = 0,
    processes: Processes | None = None,
    after_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Unit vectors (N, D) of the test crops, in the order of the items, in every process; `network` is in eval mode."""
    processes = processes or Processes()
    mine = list(range(processes.rank, len(items), processes.count))
    # every process runs as many batches as the others, which sharded networks need; what is over is cut off
    padded = mine + [0] * (-(-len(items) // processes.count) - len(mine))
    rows = []
    with closing(
        eval_batches(source, padded, items, preprocessing, batch, workers, pins_memory(processes.device))
    ) as batches:
        for images, _ in processes.together(batches):
            rows.append(normalise(network.embed(to_input(images, preprocessing, processes.device))).cpu())
            after_batch()
    parts = processes.gather(torch.cat(rows)[: len(mine)])
    vectors = torch.empty(len(items), parts[0].shape[1])
    for process, part in enumerate(parts):
        vectors[process :: processes.count] = part
    return vectors


def knn_accuracy(queries: Tensor, truth: Tensor, items: Tensor, labels: Tensor, k: int, sigma: float = SIGMA) -> float:
    """The share of queries (Q, D) whose most probable class of Eq. 2.6, with the `k` nearest of `items`, is theirs."""
    probabilities = knn_probabilities(queries, items, labels, min(k, len(items)), sigma)
    return float((probabilities.argmax(dim=1) == truth).double().mean())
