"""Class names: as many as there are logits, in their order, no two alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from patchloom.errors import PatchloomError

MOST_CLASSES = 10**7  # that a network may have


def check_class_names(names: Any, num_classes: int) -> tuple[str, ...]:
    """Class names in the order of the logits. Raises PatchloomError for another number or type, or a name twice."""
    sound = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not sound or len(names) != num_classes:
        what = f"{len(names)} names" if sound else repr(names)[:80]
        raise PatchloomError(f"The class names of {num_classes} classes are a list of {num_classes} words, not {what}.")
    return check_distinct(names, "The network")


def names_or_indices(names: Sequence[str] | None, num_classes: int) -> tuple[str, ...]:
    """Class names, or "0", "1", ... for a network that has none."""
    return tuple(names) if names else tuple(map(str, range(num_classes)))


def check_distinct(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Class names, none of them twice: a prediction by name must say which class it is."""
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise PatchloomError(f"{where} has several classes named {twice[0]!r}: class names must be different.")
    return tuple(names)
