"""`Index`: images that can be searched by similarity, classified by, added and removed without training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.console import Console
from patchloom.data.collating import collate
from patchloom.data.images import as_picture, crop, to_input
from patchloom.devices import Device, choose_device, device_of
from patchloom.errors import PatchloomError, check_place
from patchloom.inference.embeddings import BATCH, embed_pixels
from patchloom.inference.models import Model
from patchloom.inference.neighbours import Nearest, best, choose_k, normalise, score_blocks, vote
from patchloom.inference.predict import expand_all
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing
from patchloom.search import building, changes
from patchloom.search.approximate import Approximate
from patchloom.search.columns import Labels, find_class, find_column
from patchloom.search.conditions import Condition, Ranking, classifies, coarse_column, column_of_class, softmax_of
from patchloom.search.results import Queries, probabilities_of, query_name, without
from patchloom.search.storage import Column, Contents, Header, read_index
from patchloom.search.weights import check_digest, reopen


class Index:
    """An index on disk. `Index.build` makes one, `Index.open` opens one.

    Images are paths or PIL images, one or several; a folder stands for all images in it.
    """

    def __init__(
        self, path: Path, header: Header, contents: Contents, weights: Model | None = None, device: Device = "auto"
    ) -> None:
        self.path, self.header, self.contents = path, header, contents
        self._weights, self._device = weights, device

    @classmethod
    def build(
        cls,
        weights: Model,
        data: str | PathLike[str] | Any,
        out: str | PathLike[str],
        *,
        labels: Labels = None,
        split: str | None = None,
        kind: str = "exact",
        resume: bool = False,
        hints: Mapping[str, Any] | None = None,
        batch: int = BATCH,
        workers: int = 0,
        device: Device = "auto",
        console: Console | None = None,
    ) -> Index:
        """Embed all images of `data` and write an index to the folder `out`.

        weights   a run folder, an export, a file of weights or a published tag; or a network
        data      whatever `patchloom.train` takes
        labels    label columns to keep with the images; none are needed
        split     a split of the data, or several as "train+val"; by default all images
        kind      "exact", or approximate neighbours by faiss: "hnsw" or "ivf"
        resume    continue a build that was interrupted
        hints     what a bare file of weights does not say: options of the network, mean and std

        Raises:
            PatchloomError: `out` exists, or weights, data or a label column are not what they should be.
        """
        options: dict[str, Any] = {"labels": labels, "split": split, "kind": kind, "resume": resume, "hints": hints}
        building.build(weights, data, out, batch=batch, workers=workers, device=device, console=console, **options)
        return cls.open(out, weights=weights if isinstance(weights, Network) else None, device=device)

    @classmethod
    def open(cls, path: str | PathLike[str], *, weights: Model | None = None, device: Device = "auto") -> Index:
        """Open an index. Its network is loaded when it is first needed, from where the index remembers it, or from
        `weights`, which must be the same.

        Raises:
            PatchloomError: The folder is not an index, it is damaged, or a newer patchloom wrote it; or the device is
                not there.
        """
        choose_device(device)  # now, not at the first query: the network is loaded later
        check_place("index", path)
        folder = Path(path)
        header, contents = read_index(folder)
        index = cls(folder, header, contents, weights, device)
        if isinstance(weights, Network):
            check_digest(header.model, weights, folder)
        return index

    def __len__(self) -> int:
        return self.header.count

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, {self.header.count} images, {self.header.kind})"

    @property
    def columns(self) -> dict[str, Column]:
        """The label columns: class names, and the label of every image."""
        return self.contents.columns

    @cached_property
    def network(self) -> Network:
        """The network that the index was built with, for inference."""
        network = reopen(self.header.model, self.path, self._weights, self._device)
        network.preprocessing = Preprocessing.from_json(self.header.preprocessing)
        return fuse(network)

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of every key."""
        return {key: place for place, key in enumerate(self.contents.keys)}

    def load(self) -> None:
        """Load now what is otherwise loaded on first use: the network and the approximate neighbours."""
        _ = self.network, self._approximate, self.places

    @cached_property
    def _approximate(self) -> Approximate | None:
        return building.read_approximate(self.path, self.header)

    def query(
        self, images: Any, k: int = 10, condition: str = "none", *, coarse: str | None = None
    ) -> list[dict[str, Any]]:
        """For each image its `k` nearest in the index, and the kNN probabilities of its classes.

        condition   "none" ranks by cosine; "coarse" by Eq. 2.5, with the query's probabilities of the coarse classes:
                    those of the network if it classifies them, else of the neighbours; "oracle=NAME" puts the images
                    of this class first
        coarse      the column of the coarse classes; by default the one that the network was trained on

        Returns:
            [{"query", "results": [{"key", "score", "labels": {column: class}}], "knn": {column: {class: probability}}}]
        """
        k = _whole(k)
        if k < 1:
            raise PatchloomError(f"-k must be at least 1, not {k}.")
        chosen = Condition.parse(condition)
        column = self._coarse(chosen, coarse)
        queries = self._embed(images, column if chosen.kind == "coarse" else None)
        return self._query(queries, k, chosen, column)

    def query_cropped(
        self, pixels: Tensor, k: int = 10, condition: str = "none", *, coarse: str | None = None
    ) -> list[dict[str, Any]]:
        """The same for images that are cropped for the network already: (Q, height, width, 3) uint8."""
        chosen = Condition.parse(condition)
        column = self._coarse(chosen, coarse)
        vectors, softmax = self._embed_cropped(pixels, column if chosen.kind == "coarse" else None)
        names = [query_name(None, i) for i in range(len(pixels))]
        return self._query(Queries(names, vectors, softmax), k, chosen, column)

    def query_key(self, key: str, k: int = 10, condition: str = "none", *, coarse: str | None = None) -> dict[str, Any]:
        """The same for an image of the index, by its stored vector. The image itself is left out of the results and of
        the votes. The coarse probabilities are always those of its neighbours, since its file may be gone."""
        if key not in self.places:
            raise PatchloomError(f"{self.path} has no image {key!r}.")
        place, chosen = self.places[key], Condition.parse(condition)
        queries = Queries([key], np.asarray(self.contents.vectors[place : place + 1]), None)
        return self._query(queries, k, chosen, self._coarse(chosen, coarse), place)[0]

    def query_vectors(
        self, vectors: np.ndarray, k: int = 10, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The same for embeddings (Q, D), such as those of images in the index."""
        named = list(names) if names is not None else [str(i) for i in range(len(vectors))]
        return self._query(Queries(named, normalise(vectors).numpy(), None), k, Condition(), None)

    def _query(
        self, queries: Queries, k: int, condition: Condition, column: str | None, left_out: int | None = None
    ) -> list[dict[str, Any]]:
        """The answers to queries; a single one can leave out an item, for which one neighbour more is found."""
        more = 0 if left_out is None else 1
        # Each column has a k of its own, and only images with a label in it vote: hence one search per column.
        near = {
            name: without(
                self._neighbours(queries.vectors, name, self.header.k[name] + more), left_out, self.header.k[name]
            )
            for name in self.columns
        }
        votes = {
            name: vote(found, self.columns[name].labels, found.places.shape[1], len(self.columns[name].names))
            for name, found in near.items()
        }
        ranking = self._ranking(queries, condition, column, votes)
        found = without(self._search(queries.vectors, min(k + more, len(self)), ranking), left_out, k)
        return [
            {
                "query": name,
                "results": [
                    {"key": self.contents.keys[place], "score": score, "labels": self.contents.labels(place)}
                    for score, place in zip(found.scores[i].tolist(), found.places[i].tolist(), strict=True)
                ],
                "knn": {label: probabilities_of(self.columns[label], votes[label][i]) for label in votes},
            }
            for i, name in enumerate(queries.names)
        ]

    def classify(self, images: Any, labels: str, k: int | None = None) -> list[dict[str, Any]]:
        """For each image the probabilities of the classes of one column, by its nearest neighbours (Eq. 2.6).

        `k` is chosen by leave-one-out on the index unless given. Classes may have been added after training.

        Returns:
            [{"query", "k", "probabilities": {class: probability}}]
        """
        column = self.columns[find_column(self.columns, labels, self.path)]
        if k is not None and not 1 <= (k := _whole(k)) <= len(self):
            raise PatchloomError(f"-k must be between 1 and {len(self)}, the images of {self.path}, not {k}.")
        number = k or self.header.k[labels]
        queries = self._embed(images)
        found = self._neighbours(queries.vectors, labels, number)
        votes = vote(found, column.labels, found.places.shape[1], len(column.names))
        return [
            {"query": name, "k": number, "probabilities": probabilities_of(column, votes[i])}
            for i, name in enumerate(queries.names)
        ]

    def leave_one_out(self, labels: str) -> dict[int, float]:
        """The accuracy of kNN on one column for every k, each image being classified by all others (2.3.3)."""
        column = self.columns[find_column(self.columns, labels, self.path)]
        known = column.labels >= 0
        return choose_k(self.contents.vectors[known], column.labels[known])[1]

    def add(
        self, images: Any, labels: Mapping[str, str] | None = None, *, console: Console | None = None
    ) -> dict[str, int]:
        """Add images with the same label for all: {column: class}. The class may be new.

        An image in the index whose content has not changed is not embedded again; its labels are replaced where given.
        Whatever interrupts it, the index stays as it was.

        Returns:
            The number of images that were "added", "replaced" (their file has changed) and "unchanged".
        """
        if not isinstance(labels or {}, Mapping):
            raise PatchloomError(f"labels is {{column: class}}, not {type(labels).__name__}.")
        return self._change(lambda: changes.add(self, images, labels or {}, console))

    def remove(self, keys: str | PathLike[str] | Iterable[str | PathLike[str]]) -> int:
        """Remove images by their keys or files; returns their number. An unknown one is an error, and nothing is
        removed."""
        wanted = [keys] if isinstance(keys, str | PathLike) or not isinstance(keys, Iterable) else list(keys)
        for key in wanted:
            check_place("a key", key)
        named = [os.fspath(key) for key in wanted]
        return self._change(lambda: changes.remove(self, named))

    def _change(self, change: Any) -> Any:
        """Run a change of the folder, on its state of now, and read the result."""
        with changes.locked_folder(self.path):
            self._read()
            result = change()
            self._read()
        return result

    def _read(self) -> None:
        before = self.header.model["digest"]
        self.header, self.contents = read_index(self.path)
        # They were derived from the contents before the change.
        for name in ("_approximate", "places"):
            self.__dict__.pop(name, None)
        if self.header.model["digest"] != before:
            self.__dict__.pop("network", None)

    def _coarse(self, condition: Condition, asked: str | None) -> str | None:
        """The column of a condition; None without one."""
        names = {name: column.names for name, column in self.columns.items()}
        if asked is not None:
            find_column(names, asked, self.path)  # also where the condition does not use it
        if condition.kind == "none":
            return None
        if condition.kind == "oracle":
            assert condition.name is not None
            column = column_of_class(self.columns, condition.name, asked)
            find_class(self.columns[find_column(names, column, self.path)], condition.name, f"The column {column}")
            return column
        return coarse_column(names, self.header.model["label_column"], self.network.class_names, asked)

    def _embed(self, images: Any, coarse: str | None = None) -> Queries:
        """Unit vectors of images, with the softmax of the network over a column if it classifies that."""
        names, vectors, softmax = list[str](), list[np.ndarray](), list[Tensor]()
        waiting = iter(expand_all(images))
        # However many files a folder has, one batch of them is decoded at a time.
        while some := list(islice(waiting, BATCH)):
            names += [query_name(image, len(names) + i) for i, image in enumerate(some)]
            pixels = collate([crop(as_picture(image), self.network.preprocessing) for image in some])
            found, probabilities = self._embed_cropped(pixels, coarse)
            vectors.append(found)
            softmax += [] if probabilities is None else [probabilities]
        if not names:
            raise PatchloomError("No image was given to search with.")
        return Queries(names, np.concatenate(vectors), torch.cat(softmax) if softmax else None)

    def _embed_cropped(self, pixels: Tensor, coarse: str | None) -> tuple[np.ndarray, Tensor | None]:
        """Unit vectors of cropped images (B, height, width, 3) uint8, and the softmax over a column."""
        vectors = normalise(embed_pixels(self.network, pixels, self.network.preprocessing)).numpy()
        classes = self.columns[coarse].names if coarse is not None else ()
        if coarse is None or not classifies(self.network, classes):
            return vectors, None
        batch = to_input(pixels, self.network.preprocessing, device_of(self.network))
        return vectors, softmax_of(self.network, batch, classes)

    def _ranking(
        self, queries: Queries, condition: Condition, column: str | None, votes: Mapping[str, Tensor]
    ) -> Ranking:
        if column is None:
            return Ranking()
        classes = self.columns[column]
        if condition.kind == "oracle":
            known = find_class(classes, str(condition.name), column)
            return Ranking(classes.labels, known=np.full(len(queries.names), known))
        return Ranking.by_probabilities(
            classes.labels, queries.softmax if queries.softmax is not None else votes[column]
        )

    def _search(self, queries: np.ndarray, k: int, ranking: Ranking) -> Nearest:
        """The k best; scores are cosines, or those of Eq. 2.5. Conditions and long lists are always exact."""
        plain = ranking.odds is None and ranking.known is None
        if plain and self._approximate is not None and k <= len(self) // 4:
            found = self._approximate.search(queries, k)
            # Clusters of ivf can be smaller than k, and faiss's graph can have parts that no link reaches.
            if (found.places >= 0).all():
                return found
        parts = []
        for part, cosines in score_blocks(queries, self.contents.vectors):
            found = best(ranking.scores(part, cosines), k)
            # the oracle only orders: what is shown stays a cosine
            scores = cosines.gather(1, found.places) if ranking.known is not None else found.scores
            parts.append(Nearest(scores, found.places))
        return Nearest(*(torch.cat(some) for some in zip(*parts, strict=True)))

    def _neighbours(self, queries: np.ndarray, column: str, k: int) -> Nearest:
        """The k nearest that have a label in a column; fewer where the index has fewer."""
        labels = self.columns[column].labels
        known = np.flatnonzero(labels >= 0)
        k = min(k, len(known))
        if len(known) == len(labels):
            return self._search(queries, k, Ranking())
        parts = []
        missing = torch.from_numpy(labels < 0)
        for _, cosines in score_blocks(queries, self.contents.vectors):
            parts.append(best(cosines.masked_fill_(missing, -torch.inf), k))
        return Nearest(*(torch.cat(some) for some in zip(*parts, strict=True)))


def _whole(k: Any) -> int:
    """A number of neighbours, also of numpy; anything else is a `PatchloomError`."""
    if not isinstance(k, Integral) or isinstance(k, bool):
        raise PatchloomError(f"-k is a whole number, not {k!r}.")
    return int(k)
