"""The labels of ClusterFit+ (thesis 2.4.2): clusters of the training images' vectors in a trained network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data.randomness import seed_of
from patchloom.errors import PatchloomError
from patchloom.inference.models import open_model
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.metrics import embed_items
from patchloom.tasks.spec import Context

_WHOLE = 20_000  # vectors at most that k-means takes as a whole


def cluster_labels(config: RetrievalConfig, recipe: Recipe, images: Images, context: Context) -> Tensor:
    """The cluster (N,) of each training image, from 0 on without gaps, by k-means of unit vectors; the same in every
    process. Raises PatchloomError for more clusters than images."""
    items, processes = images.split.train, context.processes
    assert config.clusters_from is not None  # `plan_runs` refuses a run without it
    if recipe.clusters > len(items):
        raise PatchloomError(f"clusters={recipe.clusters} is more than the {len(items)} training images.")
    network = open_model(config.clusters_from, device=str(processes.device))
    context.console.say(f"Clustering the vectors of {config.clusters_from} for {len(items)} images.")
    vectors = embed_items(
        network, images.source, items, network.preprocessing, batch=128, workers=recipe.workers, processes=processes
    )
    labels = _k_means(vectors.numpy(), recipe.clusters, recipe.seed) if processes.is_main_process else None
    return torch.from_numpy(processes.gather(labels)[0])


def _k_means(vectors: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans, MiniBatchKMeans

    options: Any = {"n_init": 3, "random_state": seed_of(seed, "clusters") % 2**32}
    # With batches of fewer vectors than clusters, most centres would hardly move from where they begin.
    by_batches = MiniBatchKMeans(clusters, batch_size=max(1024, 4 * clusters), **options)
    kind = by_batches if len(vectors) > _WHOLE else KMeans(clusters, **options)
    found = kind.fit_predict(vectors)
    return np.unique(found, return_inverse=True)[1].astype(np.int64)  # empty clusters are left out
