"""Approximate neighbours by faiss: a graph (hnsw) or clusters (ivf), with their recall measured on the index itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.errors import PatchloomError, check_choice
from patchloom.inference.neighbours import Nearest, nearest
from patchloom.install import needed
from patchloom.temporary import sync

KINDS = ("exact", "hnsw", "ivf")
RECALL_OF = 10  # neighbours whose recall is measured
_QUERIES = 1000  # items that it is measured with, evenly spread
_TARGET = 0.95  # the search becomes wider until this recall is reached
_LINKS, _BUILD_WIDTH = 32, 200  # of hnsw
_WIDEST = 4096
_ROUNDING = 1e-5  # by which faiss's cosines differ from ours


def check_kind(kind: str) -> None:
    """Refuse an unknown kind, or one whose library is missing, before any work."""
    check_choice("--kind", kind, KINDS)
    if kind != "exact":
        library()


def library() -> Any:
    """faiss, which is imported on use: beside torch, it brings a second OpenMP runtime on some systems."""
    with needed("hnsw and ivf indexes need faiss", "search"):
        import faiss
    return faiss


class Approximate:
    """Neighbours by a faiss index of inner products; `settings` are its width of search and measured recall."""

    def __init__(self, index: Any, settings: dict[str, Any]) -> None:
        self.index, self.settings = index, settings

    @classmethod
    def build(cls, kind: str, vectors: np.ndarray) -> Approximate:
        """An index of unit vectors (N, D); the search is widened until it finds 95 % of the 10 nearest."""
        faiss = library()
        count, dim = vectors.shape
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = _BUILD_WIDTH
        else:
            lists = max(1, min(round(4 * count**0.5), count // 39))  # faiss wants 39 vectors per cluster to train
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
            index.cp.min_points_per_centroid = 1  # else faiss prints a warning for fewer
            index.train(np.ascontiguousarray(vectors))
        index.add(np.ascontiguousarray(vectors))
        built = cls(index, {"kind": kind})
        built.tune(vectors)
        return built

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any]) -> Approximate:
        """What `write` wrote."""
        try:
            index = library().read_index(str(path))
        except RuntimeError as error:
            raise PatchloomError(f"{path} cannot be read by faiss: {error}.") from error
        read = cls(index, dict(settings))
        read._set_width(int(settings["width"]))
        return read

    def write(self, path: Path) -> None:
        library().write_index(self.index, str(path))
        sync(path)

    def add(self, vectors: np.ndarray, everything: np.ndarray) -> None:
        """Take further vectors; `everything` is all of them, to measure the recall on."""
        self.index.add(np.ascontiguousarray(vectors))
        self.tune(everything)

    def tune(self, vectors: np.ndarray) -> None:
        """Find the width of search that reaches the recall, and store both."""
        width = max(int(self.settings.get("width", 0)), 64 if self.settings["kind"] == "hnsw" else 4)
        most = _WIDEST if self.settings["kind"] == "hnsw" else max(1, self.index.nlist)
        while True:
            width = min(width, most)
            self._set_width(width)
            recall = self._recall(vectors)
            if recall >= _TARGET or width == most:
                self.settings |= {"width": width, "recall": round(recall, 6), "recall_of": RECALL_OF}
                return
            width *= 2

    def _recall(self, vectors: np.ndarray) -> float:
        """The share of the 10 nearest that are found, for items of the index."""
        k, count = min(RECALL_OF, len(vectors)), len(vectors)
        if not count:
            return 1.0
        chosen = np.arange(min(_QUERIES, count)) * count // min(_QUERIES, count)
        true, found = nearest(vectors[chosen], vectors, k).scores, self.search(vectors[chosen], k).scores
        # By score, since any of several equal images is as near as the others.
        return float((found >= true[:, -1:] - _ROUNDING).double().mean())

    def search(self, queries: np.ndarray, k: int) -> Nearest:
        """The k best that are found of each query. Where fewer are reached, the last places are -1, with the lowest
        score."""
        scores, places = self.index.search(np.ascontiguousarray(queries, np.float32), k)
        return Nearest(torch.from_numpy(scores), torch.from_numpy(places))

    def _set_width(self, width: int) -> None:
        if self.settings["kind"] == "hnsw":
            self.index.hnsw.efSearch = width
        else:
            self.index.nprobe = min(width, self.index.nlist)
