"""Words for messages: plurals and shortened lists. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: count(1, "image") is "1 image", count(2, "class", "classes") is "2 classes"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, as the end of a sentence."""
    return ", ".join(names[:most]) + (", ..." if names[most:] else ".")
