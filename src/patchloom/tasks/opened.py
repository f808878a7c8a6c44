"""What the plan of a run has opened, for the task that is opened next: data is listed and weights are loaded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Opened:
    """Sources, texts and networks, by the call that opened them, such as (open_source, data, labels).

    A plan calls `keep`, the `open` of its task `take`, each in the same process. recipe.yaml knows nothing of it: where
    no plan came before, as in a resumed run, `take` opens.
    """

    def __init__(self) -> None:
        # A list, not a dict: hints for weights have no hash. It has a few entries.
        self._kept: list[tuple[tuple[Any, ...], Any]] = []

    def keep(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What the call opens, kept for `take`; if it is kept already, it is not opened again."""
        opened = self.take(function, *args, **options)
        self._kept.append(((function, args, options), opened))
        return opened

    def take(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What the call opens, from a plan if one has kept it. It then belongs to the caller, who may change it: a
        network of gigabytes is freed with its user, and a second run of the same plan opens for itself."""
        call = (function, args, options)
        for place, (kept, opened) in enumerate(self._kept):
            if kept == call:
                del self._kept[place]
                return opened
        return function(*args, **options)

    def clear(self) -> None:
        """Free what was not taken."""
        self._kept.clear()
