"""What embeddings keep of labels that they were not trained on: the preliminary study of Grafit (thesis 2.2).

Separability (Table 2.1), a linear classifier of fine labels (Table 2.2), the energy of principal components (Fig. 2.1)
and t-SNE coloured by two levels (Fig. 2.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.console import Console
from patchloom.data.images import to_input
from patchloom.data.loader import eval_batches
from patchloom.data.sources import Item, Source, spread
from patchloom.devices import Device, device_of, pins_memory
from patchloom.errors import PatchloomError
from patchloom.inference.embeddings import embeddings
from patchloom.inference.probes import linear_probabilities
from patchloom.inference.projections import pca_energy, tsne
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.plots import new_figure, save_figure
from patchloom.search.columns import labels_of, open_labelled
from patchloom.search.conditions import classifies, softmax_of
from patchloom.search.evaluation import sides
from patchloom.search.weights import open_weights
from patchloom.temporary import write_json
from patchloom.text import without_nan

SPLITS = 10  # random halvings of every class (Table 2.1)
SHOWN = 500  # images in the t-SNE plot


def analyse_search(
    runs: Sequence[str],
    data: str,
    fine: str,
    coarse: str,
    *,
    count: int | None = None,
    shown: int = SHOWN,
    splits: int = SPLITS,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """The preliminary study for every run.

    fine, coarse   two label columns
    count          training images for PCA and separability, evenly spread; by default all. As many as the embedding has
                   dimensions are needed to see the number of training classes in the energy
    shown          images in the t-SNE plot

    Returns:
        {"runs": {run: {"separability", "linear", "pca_energy", "tsne"}}}
    """
    console = console or Console(quiet=True)
    source = open_labelled(data, [fine, coarse])
    found: dict[str, Any] = {"fine": fine, "coarse": coarse, "runs": {}}
    for run in runs:
        console.say(f"{run}:")
        network = fuse(open_weights(run, None, device))
        train, test = sides(source, run, data, console)
        some = train if count is None else spread(train, count)
        x, z = (embeddings(network, source, items, network.preprocessing) for items in (some, test))
        known, truth = labels_of(source, some), labels_of(source, test)
        softmax = _softmax(network, source, some, known[coarse].names)
        places = spread(range(len(some)), shown)
        probabilities = linear_probabilities(x, known[fine].labels, z, len(known[fine].names))
        found["runs"][str(run)] = {
            "separability": separability(x, known[coarse].labels, softmax, splits),
            "linear": float((probabilities.argmax(axis=1) == truth[fine].labels).mean()),
            "pca_energy": pca_energy(x.astype(np.float64)).tolist(),
            "tsne": {
                "points": tsne(x[places].astype(np.float64)).tolist(),
                **{name: [str(known[name].name(place)) for place in places] for name in (fine, coarse)},
            },
        }
    return found


def separability(
    x: np.ndarray, coarse: np.ndarray, softmax: np.ndarray | None = None, splits: int = SPLITS
) -> dict[str, float | None]:
    """Table 2.1: the accuracy, on the training images themselves, of a linear classifier of labels that halve every
    class at random; mean and standard deviation over `splits` halvings.

    `softmax` (N, classes) are the network's coarse probabilities, also of classes that no image has. With them,
    `conditioned` is the accuracy of the fine probabilities multiplied by that of their class. It is None for a network
    that does not classify.
    """
    plain, conditioned = [], []
    classes = int(coarse.max()) + 1 if softmax is None else softmax.shape[1]
    for seed in range(splits):
        halves = halve(coarse, seed)
        probabilities = _fit(x, halves, classes)
        plain.append(float((probabilities.argmax(axis=1) == halves).mean()))
        if softmax is not None:
            both = probabilities * np.repeat(softmax, 2, axis=1)
            conditioned.append(float((both.argmax(axis=1) == halves).mean()))
    return {
        "accuracy": float(np.mean(plain)),
        "std": float(np.std(plain)),
        "conditioned": float(np.mean(conditioned)) if conditioned else None,
        "conditioned_std": float(np.std(conditioned)) if conditioned else None,
        "splits": splits,
    }


def halve(coarse: np.ndarray, seed: int) -> np.ndarray:
    """(N,) labels 2c and 2c + 1: each class c is halved at random, evenly."""
    generator, labels = np.random.default_rng(seed), np.empty(len(coarse), np.int64)
    for name in np.unique(coarse):
        places = generator.permutation(np.flatnonzero(coarse == name))
        labels[places] = 2 * name + (np.arange(len(places)) % 2)
    return labels


def _fit(x: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """(N, 2 classes): probabilities of a logistic regression for the images that it was fitted to."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fitted = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x, labels)
    probabilities = np.zeros((len(x), 2 * classes))
    probabilities[:, fitted.classes_] = fitted.predict_proba(x)
    return probabilities


def _softmax(network: Network, source: Source, items: Sequence[Item], names: Sequence[str]) -> np.ndarray | None:
    if not classifies(network, names):
        return None
    preprocessing, device = network.preprocessing, device_of(network)
    batches = eval_batches(source, range(len(items)), items, preprocessing, 128, 0, pins_memory(device))
    rows = [softmax_of(network, to_input(images, preprocessing, device), names) for images, _ in batches]
    return torch.cat(rows).numpy()


def table_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """One row per run: separability without and with conditioning, and the linear classifier, in percent."""
    rows = [["run", "separability", "conditioned", f"linear {found['fine']}", ""]]
    for run, one in found["runs"].items():
        separability = one["separability"]
        with_ = (
            "-"
            if separability["conditioned"] is None
            else f"{_percent(separability['conditioned'], separability['conditioned_std'])}"
        )
        rows.append(
            [run, _percent(separability["accuracy"], separability["std"]), with_, f"{100 * one['linear']:.1f}", ""]
        )
    return rows


def _percent(mean: float, std: float) -> str:
    return f"{100 * mean:.1f} ± {100 * std:.1f}"


def write_analyses(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write analyses.json, the curves of PCA energy, and the t-SNE plots: a row per run, a column per level."""
    paths = [folder / name for name in ("analyses.json", "pca.png", "tsne.png")]
    write_json(paths[0], without_nan(found))
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for run, one in found["runs"].items():
        axes.plot(range(1, len(one["pca_energy"]) + 1), one["pca_energy"], label=Path(run).name)
    axes.set_xscale("log")
    axes.set_xlabel("principal components")
    axes.set_ylabel("cumulative energy")
    axes.legend()
    save_figure(figure, paths[1])
    _draw_tsne(found, paths[2])
    return paths


def _draw_tsne(found: Mapping[str, Any], path: Path) -> None:
    runs = found["runs"]
    if not runs:
        raise PatchloomError("Name at least one run to analyse.")
    figure = new_figure(10, 4.6 * len(runs))
    grid = figure.subplots(len(runs), 2, squeeze=False)
    for line, (run, one) in zip(grid, runs.items(), strict=True):
        points = np.asarray(one["tsne"]["points"])
        for axes, level in zip(line, (found["coarse"], found["fine"]), strict=True):
            names = sorted(set(one["tsne"][level]))
            for number, name in enumerate(names):
                of_class = [other == name for other in one["tsne"][level]]
                colour = f"C{number % 10}" if len(names) <= 10 else _hue(number / len(names))
                axes.scatter(*points[of_class].T, s=9, color=colour, label=name)
            axes.set_title(f"{Path(run).name}: {level}")
            axes.set_xticks([])
            axes.set_yticks([])
            if len(names) <= 20:
                axes.legend(fontsize=7)
    save_figure(figure, path)


def _hue(share: float) -> tuple[float, float, float]:
    import colorsys

    return colorsys.hsv_to_rgb(share, 0.75, 0.85)
