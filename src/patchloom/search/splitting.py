"""Propose finer classes: clusters of the embeddings inside every coarse class, and how stable they are.

"How fine can I go" has two answers. The number of clusters is chosen by the gap statistic (Tibshirani et al. 2001): how
much tighter the clusters are than those of structureless vectors with the same covariance. Stability says how far to
trust them: k-means on two random subsets of a class should put the images that they share into the same clusters. The
agreement is the adjusted Rand index, 1 for the same clusters and 0 for chance.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, path
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom import temporary
from patchloom.console import Console
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.install import needed
from patchloom.search.columns import find_column

if TYPE_CHECKING:
    from patchloom.search.index import Index

LEAST_GAP = 0.02  # of a class that is split; that of noise in many dimensions is below 0
NUMBERS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)  # that "auto" tries
LEAST = 10  # images per cluster on average
_PAIRS, _SHARE = 5, 0.8  # pairs of subsets that are compared, and their share of the images
_STARTS = 5  # of k-means
_REFERENCES = 3  # sets of structureless vectors


@dataclass(frozen=True)
class Clusters:
    """The clusters of one coarse class: places of its images in the index, the cluster of each, largest first."""

    places: np.ndarray
    labels: np.ndarray
    stability: float | None  # of this number of clusters; None for one cluster
    tried: dict[int, float]  # the gap of each number that was tried

    @property
    def number(self) -> int:
        return int(self.labels.max()) + 1


def cluster(vectors: np.ndarray, number: int, seed: int = 0) -> np.ndarray:
    """k-means of unit vectors, which is clustering by cosine: (N,) cluster numbers, the largest cluster first."""
    if number <= 1:
        return np.zeros(len(vectors), np.int64)
    labels = _k_means()(number, n_init=_STARTS, random_state=seed).fit_predict(vectors)
    order = np.argsort(-np.bincount(labels, minlength=number), kind="stable")
    place = np.empty(number, np.int64)
    place[order] = np.arange(number)
    return place[labels]


def stability(vectors: np.ndarray, number: int, seed: int = 0) -> float:
    """The mean adjusted Rand index of clusterings of random subsets, on the images that two subsets share."""
    from sklearn.metrics import adjusted_rand_score

    # A subset with fewer images than clusters could not be clustered.
    generator, size = np.random.default_rng(seed), max(number + 1, round(_SHARE * len(vectors)))
    agreement = []
    for pair in range(_PAIRS):
        found = []
        for one in range(2):
            part = np.sort(generator.permutation(len(vectors))[:size])
            labels = np.full(len(vectors), -1)
            labels[part] = cluster(vectors[part], number, seed=2 * pair + one)
            found.append(labels)
        # Only images that are in both subsets have two clusters to compare.
        both = (found[0] >= 0) & (found[1] >= 0)
        agreement.append(adjusted_rand_score(found[0][both], found[1][both]))
    return float(np.mean(agreement))


def gaps(vectors: np.ndarray, seed: int = 0) -> dict[int, float]:
    """For each number of clusters the gap: the logarithm of the mean distance within clusters, of structureless unit
    vectors with the same mean and covariance, minus that of the unit vectors (N, D)."""
    generator = np.random.default_rng(seed)
    centre = vectors.mean(axis=0)
    _, spread, axes = np.linalg.svd(vectors - centre, full_matrices=False)
    shape = spread[:, None] * axes / np.sqrt(len(vectors))
    drawn = (centre + generator.standard_normal((len(vectors), len(shape))) @ shape for _ in range(_REFERENCES))
    references = [one / np.linalg.norm(one, axis=1, keepdims=True) for one in drawn]
    return {
        number: float(np.mean([_within(one, number, 1, seed) for one in references]))
        - _within(vectors, number, _STARTS, seed)
        for number in NUMBERS
        if number * LEAST <= len(vectors)
    }


def _within(vectors: np.ndarray, number: int, starts: int, seed: int) -> float:
    """The logarithm of the sum of squared distances to the centres of clusters."""
    inertia = _k_means()(number, n_init=starts, random_state=seed).fit(vectors).inertia_
    return float(np.log(max(inertia, np.finfo(float).tiny)))


def choose_number(gap: Mapping[int, float]) -> int:
    """The number of clusters at the bend of the gap over the logarithm of the number; 1 if there is no gap.

    The gap rises steeply until every class has a cluster. In photos it goes on rising slowly, with small groups that
    look alike, so its largest value says little. The bend is furthest above the line from one cluster, whose gap is 0,
    to the last number (as in Satopaa et al. 2011).
    """
    if max(gap.values(), default=0.0) < LEAST_GAP:
        return 1
    last = max(gap)
    above = {number: value - gap[last] * np.log(number) / np.log(last) for number, value in gap.items()}
    return max(reversed(above), key=above.__getitem__)


def split_class(vectors: np.ndarray, places: np.ndarray, number: int | None, seed: int = 0) -> Clusters:
    """The clusters of one class: `number` of them, or as many as the gap statistic finds."""
    found = gaps(vectors, seed) if number is None else {}
    chosen = choose_number(found) if number is None else min(number, len(vectors))
    score = stability(vectors, chosen, seed) if 1 < chosen < len(vectors) else None
    return Clusters(places, cluster(vectors, chosen, seed), score, found)


def split_index(
    index: Index,
    labels: str,
    *,
    clusters: int | None = None,
    truth: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> tuple[dict[str, Clusters], dict[str, Any]]:
    """Clusters inside every class of a column, and a summary of them.

    clusters   the number in every class; by default the one that the gap statistic chooses
    truth      a column with finer classes, to compare with: adjusted Rand index and purity

    Images without a label in the column are left out.
    """
    if clusters is not None and clusters < 1:
        raise PatchloomError(f"--clusters must be at least 1, or auto, not {clusters}.")
    column = index.columns[find_column(index.columns, labels, index.path)]
    fine = None if truth is None else index.columns[find_column(index.columns, truth, index.path)]
    found: dict[str, Clusters] = {}
    summary: dict[str, Any] = {}
    for number, name in enumerate(column.names):
        places = np.flatnonzero(column.labels == number)
        if console is not None:
            console.progress(f"clustering: {name}")
        found[name] = split_class(index.contents.vectors[places], places, clusters, seed)
        one = found[name]
        summary[name] = {
            "images": len(places),
            "clusters": one.number,
            "stability": one.stability,
            "sizes": np.bincount(one.labels).tolist(),
            "tried": {str(each): score for each, score in one.tried.items()},
            **({} if fine is None else agreement(one.labels, fine.labels[places])),
        }
    result: dict[str, Any] = {"labels": labels, "classes": summary}
    if fine is not None:
        whole, offset = np.full(len(index), -1), 0
        for one in found.values():
            whole[one.places], offset = one.labels + offset, offset + one.number
        kept = whole >= 0
        result |= {"truth": truth, **agreement(whole[kept], fine.labels[kept])}
    return found, result


def agreement(clusters: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    """Adjusted Rand index, and purity: the share of images whose class is the most frequent one of their cluster.

    Images without a class (-1) are left out; both are None if no image has one.
    """
    from sklearn.metrics import adjusted_rand_score

    clusters, truth = clusters[truth >= 0], truth[truth >= 0]
    if not len(truth):
        return {"ari": None, "purity": None}
    largest = sum(np.bincount(truth[clusters == one]).max() for one in np.unique(clusters))
    return {"ari": float(adjusted_rand_score(truth, clusters)), "purity": float(largest / len(truth))}


def cluster_name(name: str, number: int) -> str:
    """The proposed class of a cluster, such as "cat 1"."""
    return f"{name} {number + 1}"


def write_manifest(index: Index, found: Mapping[str, Clusters], out: str | PathLike[str], column: str) -> int:
    """Write a CSV manifest with the columns of the index and a new one, `column`; returns the number of rows."""
    out = Path(out)
    if out.suffix.lower() != ".csv":
        raise PatchloomError(f"--out is a CSV file, not {out.name!r}.")
    if not column.strip():
        raise PatchloomError("--column is the name of a column, not empty.")
    if column in ("path", "split", *index.columns):
        raise PatchloomError(f"There is a column {column!r} already: choose another name with --column.")
    rows = sorted(
        (place, cluster_name(name, label))
        for name, one in found.items()
        for place, label in zip(one.places.tolist(), one.labels.tolist(), strict=True)
    )
    complete = [name for name, column in index.columns.items() if all(column.labels[place] >= 0 for place, _ in rows)]
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["path", *complete, column])
    for place, value in rows:
        labels = [str(index.columns[name].name(place)) for name in complete]
        writer.writerow([_path(index, place, out), *labels, value])
    with errors_in_writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(out, table.getvalue())
    return len(rows)


def _path(index: Index, place: int, out: Path) -> str:
    """The file of an image as a manifest at `out` names it."""
    root, key = index.header.data.get("root"), index.contents.keys[place]
    if root is None and not path.isabs(key):
        raise PatchloomError(f"{index.path} is of images without files, which a CSV manifest cannot name.")
    name = Path(path.relpath(path.join(root or "", key), path.abspath(out.parent))).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PatchloomError(f"{name!r} is not UTF-8, so a CSV manifest cannot name it: rename the file.") from error
    return name


def nearest_to_centre(vectors: np.ndarray, most: int) -> np.ndarray:
    """The places of the vectors nearest to their mean, nearest first: what is typical of a cluster."""
    return np.argsort(-(vectors @ vectors.mean(axis=0)), kind="stable")[:most]


def write_sheets(
    index: Index,
    found: Mapping[str, Clusters],
    out: str | PathLike[str],
    most: int = 24,
    title: str = "Proposed classes",
) -> None:
    """Write a page with a contact sheet for each cluster, its most typical images first."""
    from patchloom.search.gallery import Pictures, write_sections

    pictures = Pictures(index.header.data)
    sections = []
    for name, one in found.items():
        for number in range(one.number):
            places = one.places[one.labels == number]
            typical = places[nearest_to_centre(index.contents.vectors[places], most)]
            keys = [index.contents.keys[place] for place in typical]
            stable = "" if one.stability is None else f", stability of {name}: {one.stability:.2f}"
            sections.append((f"{cluster_name(name, number)}: {len(places)} images{stable}", keys))
    write_sections(pictures, sections, out, title)


def _k_means() -> Any:
    with needed("Clusters need scikit-learn", "search"):
        from sklearn.cluster import KMeans
    return KMeans


def parse_clusters(text: str) -> int | None:
    """--clusters: a number, or auto (None)."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise PatchloomError(f"--clusters is a number or auto, not {text!r}.") from error


def summary_rows(classes: Mapping[str, Mapping[str, Any]]) -> list[Sequence[str]]:
    """A table of the summary: one row per coarse class."""
    rows: list[Sequence[str]] = []
    for name, one in classes.items():
        stable = "-" if one["stability"] is None else f"{one['stability']:.2f}"
        scores = tuple("-" if one[key] is None else f"{one[key]:.3f}" for key in ("ari", "purity") if key in one)
        rows.append((name, str(one["images"]), str(one["clusters"]), stable, *scores, ""))
    return rows
