"""Embeddings as few numbers: the energy of their principal components, and t-SNE in the plane."""

from __future__ import annotations

import numpy as np

from patchloom.install import needed


def pca_energy(vectors: np.ndarray) -> np.ndarray:
    """The cumulative share of the variance of (N, D) vectors in their principal components, (min(N, D),)."""
    # Squared singular values of the centred matrix are the variances times N: no D x D covariance is needed.
    variances = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False) ** 2
    total = variances.sum()
    return variances.cumsum() / total if total > 0 else np.ones_like(variances)


def tsne(vectors: np.ndarray) -> np.ndarray:
    """Deterministic t-SNE of (N, D) vectors, (N, 2); raises PatchloomError if scikit-learn is missing."""
    with needed("t-SNE needs scikit-learn", "figures"):
        from sklearn.manifold import TSNE
    # scikit-learn demands fewer neighbours than points.
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, random_state=0, init="pca").fit_transform(vectors.astype(np.float32))
