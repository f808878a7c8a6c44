"""Probes: how good frozen embeddings are, by a linear classifier or by neighbours."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
import torch

from patchloom.console import Console
from patchloom.devices import Device
from patchloom.errors import PatchloomError, check_choice
from patchloom.inference.embeddings import embeddings
from patchloom.inference.items import held_out_by, open_items
from patchloom.inference.models import Model, open_fused, test_preprocessing, weights_text
from patchloom.inference.neighbours import knn_probabilities, normalise

PROBES = ("linear", "knn")
NEIGHBOURS = 10
TEMPERATURE = 0.07
_NEVER = -1e4  # the logit of a class that no training image has
_STRENGTHS = (0.01, 0.1, 1.0)  # of the logistic regression: the inverse of its decay


def probe(
    model: Model,
    data: str | PathLike[str],
    kind: str,
    *,
    labels: str | None = None,
    split: str | None = None,
    resolution: int | None = None,
    crop_ratio: float | None = None,
    base: Model | None = None,
    batch: int = 128,
    workers: int = 0,
    k: int | None = None,
    temperature: float | None = None,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """top1 and top5 on the held-out images of a probe that the training images fit: the head of the model is not used,
    so the classes may be others.

    linear   logistic regression on standardised embeddings; its decay is chosen on a fifth of the training images
    knn      votes of the `k` nearest embeddings by cosine (10), weighted by exp(cosine / `temperature`) (0.07, DINO's)

    Returns:
        probe, count (held-out images), top1, top5 (fractions), trained_on, dim; for knn also k and temperature.

    Raises:
        PatchloomError: an unknown probe or setting, a split with training images, or too few images.
    """
    _check_kind(kind, k, temperature)
    k, temperature = NEIGHBOURS if k is None else k, TEMPERATURE if temperature is None else temperature
    if split is not None and {"train", "all"} & set(split.split("+")):
        raise PatchloomError(f"A probe is fitted to the training images: --split {split} would test it on them.")
    network = open_fused(model, resolution, base, device)
    if console is not None and (text := weights_text(network)):
        console.say(text)
    preprocessing, kept = test_preprocessing(network, crop_ratio), held_out_by(model, data)
    source, held_out = open_items(data, labels, split, kept, console=console)
    fitted = kept.fitted(source) if split is None and kept is not None else "train"
    _, train = open_items(source, labels, fitted, kept)
    y, truth = (np.asarray([item.label for item in items]) for items in (train, held_out))
    if kind == "knn" and k > len(y):
        raise PatchloomError(f"--k {k} is more than the {len(y)} training images.")
    x, z = (embeddings(network, source, items, preprocessing, batch, workers) for items in (train, held_out))
    classes = len(source.class_names)
    probabilities = (
        linear_probabilities(x, y, z, classes) if kind == "linear" else _knn(x, y, z, classes, k, temperature)
    )
    order = np.argsort(-probabilities, axis=1, kind="stable")
    return {
        "probe": kind,
        "count": len(truth),
        "top1": float((order[:, 0] == truth).mean()),
        "top5": float((order[:, :5] == truth[:, None]).any(axis=1).mean()),
        "trained_on": len(y),
        "dim": x.shape[1],
        **({"k": k, "temperature": temperature} if kind == "knn" else {}),
    }


def _check_kind(kind: str, k: int | None, temperature: float | None) -> None:
    """Refuse an unknown probe, and settings that it does not have."""
    check_choice("--probe", kind, PROBES)
    if kind != "knn" and (k is not None or temperature is not None):
        raise PatchloomError("--k and --temperature are settings of --probe knn.")
    if k is not None and k < 1:
        raise PatchloomError(f"--k must be at least 1, not {k}.")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise PatchloomError(f"--temperature must be positive and finite, not {temperature}.")


def linear_probabilities(x: np.ndarray, y: np.ndarray, z: np.ndarray, classes: int) -> np.ndarray:
    """(N, classes): probabilities of a logistic regression."""
    fitted = fit_linear(x, y)
    probabilities = np.zeros((len(z), classes))
    # The training images may lack classes: those keep probability 0.
    probabilities[:, fitted.classes_] = fitted.predict_proba(z)
    return probabilities


def fit_linear(x: np.ndarray, y: np.ndarray) -> Any:
    """A logistic regression on standardised embeddings (N, D) with labels (N,); its decay is chosen on a fifth."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fit(strength: float, part: slice) -> Any:
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, C=strength)).fit(x[part], y[part])

    # Shuffled, since the images come sorted by class; the same fifth in every call.
    order = np.random.default_rng(0).permutation(len(x))
    x, y, fifth = x[order], y[order], len(x) // 5
    left_out, rest = slice(0, fifth), slice(fifth, None)
    if not fifth or len(set(y[rest])) < 2:
        raise PatchloomError(
            f"A linear probe needs more than these {len(x)} training images, of at least two classes: its decay is "
            f"chosen on a fifth of them. --probe knn works with few images."
        )
    best = max(_STRENGTHS, key=lambda strength: fit(strength, rest).score(x[left_out], y[left_out]))
    return fit(best, slice(None))


def linear_head(x: np.ndarray, y: np.ndarray, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `fit_linear` finds as the weight (classes, D) and bias (classes,) of one layer of the embeddings as they
    are. Classes without training images get a bias that nothing outweighs."""
    fitted = fit_linear(x, y)
    scaler, regression = fitted[0], fitted[-1]
    rows, shifts = regression.coef_, regression.intercept_
    if len(rows) == 1:  # of two classes the regression has one row, the log-odds of the second
        rows, shifts = np.concatenate([0 * rows, rows]), np.concatenate([0 * shifts, shifts])
    weight, bias = np.zeros((classes, x.shape[1])), np.full(classes, _NEVER)
    # (x - mean) / scale is part of the layer.
    weight[fitted.classes_] = rows / scaler.scale_
    bias[fitted.classes_] = shifts - (rows / scaler.scale_) @ scaler.mean_
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()


def _knn(
    x: np.ndarray,
    y: np.ndarray,
    z: np.ndarray,
    classes: int,
    k: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """(N, classes): weighted votes of the nearest neighbours.

    Args:
        x, y: embeddings (M, D) and labels (M,) of the training images.
        z: embeddings (N, D) of the held-out ones.
    """
    return knn_probabilities(normalise(z), normalise(x), torch.from_numpy(y), k, temperature, classes).numpy()
