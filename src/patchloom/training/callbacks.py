"""A user's own code in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Callback:
    """Subclass it and define one of the methods. The main process calls them."""

    def after_step(self, step: int, losses: Mapping[str, float]) -> None:
        """After update `step`, with the losses of this process's batch, each a mean over the batch."""

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """After an evaluation, with the record that log.jsonl has."""
