"""Words for messages: plurals, shortened lists and descriptions of values. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: count(1, "image") is "1 image", count(2, "class", "classes") is "2 classes"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, as the end of a sentence."""
    return ", ".join(names[:most]) + (", ..." if names[most:] else ".")


def describe(value: object) -> str:
    """A value by its type: "a float32 tensor of shape (4, 8)", "a list of 3 values", "NoneType"."""
    if (shape := getattr(value, "shape", None)) is not None:
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"a {dtype} tensor of shape {tuple(shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {count(len(value), 'value')}"
    return type(value).__name__
