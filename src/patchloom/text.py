"""Words for messages (plurals, shortened lists, descriptions of values) and values for JSON. Imports nothing of the
package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: count(1, "image") is "1 image", count(2, "class", "classes") is "2 classes"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, as the end of a sentence."""
    return ", ".join(names[:most]) + (", ..." if names[most:] else ".")


def without_nan(value: Any) -> Any:
    """Values for JSON, which knows no NaN and no infinity: null in their place, at any depth; numpy's numbers become
    Python's."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, Real) and not isinstance(value, int):
        return float(value) if math.isfinite(value) else None
    return value


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values read from JSON, with tuples in place of its lists: frozen configs hold tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def describe(value: object) -> str:
    """A value by its type: "a float32 tensor of shape (4, 8)", "a list of 3 values", "NoneType"."""
    if (shape := getattr(value, "shape", None)) is not None:
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {tuple(shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {count(len(value), 'value')}"
    return type(value).__name__
