"""Rank under a coarse label: by the query's coarse probabilities (Eq. 2.5), or by a class that is known (oracle)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.inference.neighbours import conditioned, log_odds, oracle
from patchloom.models.network import Network
from patchloom.search.storage import Column

CONDITIONS = ("none", "coarse", "oracle=NAME")


@dataclass(frozen=True)
class Condition:
    """none, coarse, or oracle with the name of a class."""

    kind: str = "none"
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Condition:
        if not isinstance(text, str):
            raise PatchloomError(f"condition is text, not {type(text).__name__}.")
        kind, equals, name = text.partition("=")
        if (kind in ("none", "coarse") and not equals) or (kind == "oracle" and name):
            return cls(kind, name or None)
        raise PatchloomError(f"Unknown value {text!r} for --condition. Choose from: {', '.join(CONDITIONS)}.")


def coarse_column(
    columns: Mapping[str, Sequence[str]], trained: str | None, class_names: Sequence[str] | None, asked: str | None
) -> str:
    """The column of the coarse classes: the one that is asked for, the one that the network was trained on, or the
    only one with the classes of the network. `columns` has the class names of each."""
    listed = ", ".join(columns) or "none"
    if asked is not None:
        if asked not in columns:
            raise PatchloomError(f"Unknown label column {asked!r} for --coarse. Label columns: {listed}.")
        return asked
    if trained is not None and trained in columns:
        return trained
    same = [name for name, names in columns.items() if class_names is not None and set(names) == set(class_names)]
    if len(same) == 1:
        return same[0]
    was = f"was trained on {trained!r}" if trained else "does not say which column it was trained on"
    raise PatchloomError(f"The network {was}, and the label columns are: {listed}. Name one with --coarse COLUMN.")


def column_of_class(columns: Mapping[str, Column], name: str, asked: str | None) -> str:
    """The column that has the class of an oracle; the coarsest of several."""
    if asked is not None:
        return asked
    having = [column for column, labels in columns.items() if name in labels.names]
    if not having:
        known = ", ".join(sorted({one for labels in columns.values() for one in labels.names})[:20])
        raise PatchloomError(f"No label column has the class {name!r} of --condition oracle={name}. Classes: {known}.")
    return min(having, key=lambda column: len(columns[column].names))


def classifies(network: Network, names: Sequence[str]) -> bool:
    """Whether the softmax of a network is a probability of all these classes: it has a classifier that names them."""
    has_head = bool(getattr(network.config, "classifier", True))
    return has_head and network.class_names is not None and set(names) <= set(network.class_names)


@torch.inference_mode()
def softmax_of(network: Network, batch: Tensor, names: Sequence[str]) -> Tensor:
    """(B, len(names)) float64: the softmax of a classifier, its classes in the order of `names`."""
    assert network.class_names is not None
    places = [network.class_names.index(name) for name in names]
    logits: Any = network(batch)
    return logits.float().softmax(dim=1).double().cpu()[:, places]


@dataclass(frozen=True)
class Ranking:
    """Scores to rank by: cosines, with what a condition adds for each query."""

    coarse: Any = None  # (N,) class of each item
    odds: Tensor | None = None  # (Q, classes)
    known: Any = None  # (Q,) class of each query, for the oracle

    def scores(self, part: slice, cosines: Tensor) -> Tensor:
        """(part, N): cosines of some queries -> scores."""
        if self.odds is not None:
            return conditioned(cosines, self.odds[part], self.coarse)
        if self.known is not None:
            return oracle(cosines, self.known[part], self.coarse)
        return cosines

    @classmethod
    def by_probabilities(cls, coarse: Any, probabilities: Tensor) -> Ranking:
        return cls(coarse, log_odds(probabilities))
