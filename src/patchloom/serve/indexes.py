"""The index of a service: opened beside the model that made it, looked up by key, and queried."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from patchloom.errors import PatchloomError
from patchloom.search.columns import find_column
from patchloom.search.conditions import Condition, coarse_column, column_of_class
from patchloom.search.gallery import Pictures
from patchloom.search.index import Index
from patchloom.search.storage import read_header
from patchloom.search.weights import network_digest
from patchloom.serve.refused import Refused

if TYPE_CHECKING:
    from patchloom.serve.hosting import HostedModel


class HostedIndex:
    """An index and the hosted model that it was built with.

    Args:
        path: the folder of the index.
        models: the models of the service; one of them must have the weights of the index.
        coarse: the label column of the coarse condition; by default the one that the model was trained on, if the
            index has it.

    Raises:
        PatchloomError: The index is missing, damaged or of other weights, or it has no column `coarse`.
    """

    def __init__(self, path: str, models: Mapping[str, HostedModel], coarse: str | None = None) -> None:
        self.model = _model_of(Path(path), models)
        self.index = Index.open(path, weights=self.model.network)
        self.index.load()
        self.coarse = self._coarse(coarse)
        # finest first: the labels of a neighbour are shown in this order
        self.columns = sorted(self.index.columns, key=lambda name: -len(self.index.columns[name].names))
        self._keys = {encodable(key): key for key in self.index.places}
        self._pictures = Pictures(self.index.header.data)
        self._reading = threading.Lock()

    def _coarse(self, asked: str | None) -> str | None:
        if asked is not None:
            return find_column(self.index.columns, asked, self.index.path)
        names = {name: column.names for name, column in self.index.columns.items()}
        trained = self.index.header.model["label_column"]
        try:
            return coarse_column(names, trained, self.index.network.class_names, None)
        except PatchloomError:
            return None

    def describe(self) -> dict[str, Any]:
        """The entry `index` of /api/models."""
        return {
            "model": self.model.name,
            "images": len(self.index),
            "kind": self.index.header.kind,
            "columns": [encodable(name) for name in self.columns],
            "coarse": None if self.coarse is None else encodable(self.coarse),
        }

    def key(self, text: str) -> str:
        """The key that a client names; raises Refused (404) for any other text."""
        if text not in self._keys:
            raise Refused(404, "There is no image with this key in the index.")
        return self._keys[text]

    def check(self, condition: str) -> None:
        """Refuse a condition that the index cannot rank by."""
        try:
            chosen = Condition.parse(condition)
        except PatchloomError:
            raise Refused(422, "Invalid parameter condition: choose none, coarse or oracle=NAME.") from None
        if chosen.kind == "coarse" and self.coarse is None:
            raise Refused(422, "The index has no coarse column: start the server with --coarse COLUMN.")
        if chosen.name is not None:
            try:
                column_of_class(self.index.columns, chosen.name, None)
            except PatchloomError:
                raise Refused(
                    422, "Invalid parameter condition: no label column has the class of the oracle."
                ) from None

    def query(self, pixels: np.ndarray, k: int, condition: str) -> dict[str, Any]:
        """The neighbours of an image that is cropped for the model: (height, width, 3) uint8."""
        batch = torch.from_numpy(np.array(pixels, order="C"))[None]  # a copy: torch warns of read-only arrays
        return _plain(self.index.query_cropped(batch, k, condition, coarse=self._column(condition))[0])

    def query_key(self, key: str, k: int, condition: str) -> dict[str, Any]:
        """The neighbours of an image of the index."""
        return _plain(self.index.query_key(key, k, condition, coarse=self._column(condition)))

    def _column(self, condition: str) -> str | None:
        return self.coarse if condition == "coarse" else None

    def stored(self, key: str, most: int) -> bytes | Image.Image:
        """The file of an image, of at most `most` bytes, or its picture; raises Refused (404) if it is not there."""
        with self._reading:  # archives are read from one place at a time
            found = self._pictures.stored(key, most)
        if not found:
            raise Refused(404, "The picture of this image is not there any more, or it is too large.")
        return found


def _model_of(path: Path, models: Mapping[str, HostedModel]) -> HostedModel:
    built = read_header(path).model
    for model in models.values():
        if network_digest(model.network) == built["digest"]:
            return model
    raise PatchloomError(
        f"The index {path} was built with other weights ({built['name']}) than those of {', '.join(models)}. "
        "Serve the model that it was built with, or build an index with this one."
    )


def encodable(text: str) -> str:
    """Text for JSON: file names that are not UTF-8 have lone surrogates, which no encoding of JSON can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """An answer of `Index` for JSON, without the name of the query."""
    return {
        "results": [
            {**result, "key": encodable(result["key"]), "labels": _labels(result["labels"])}
            for result in found["results"]
        ],
        "knn": {
            encodable(column): {encodable(name): value for name, value in probabilities.items()}
            for column, probabilities in found["knn"].items()
        },
    }


def _labels(labels: Mapping[str, str | None]) -> dict[str, str | None]:
    return {encodable(column): None if name is None else encodable(name) for column, name in labels.items()}
