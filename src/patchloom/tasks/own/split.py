"""Which entries of a dataset are held out."""

from __future__ import annotations

import hashlib

from patchloom.data.splits import Splits

_FRACTION = 0.2


def split_indices(count: int, splits: Splits) -> tuple[list[int], list[int]]:
    """Indices to learn from and to hold out: a fraction by a hash, the same on every machine and in every run."""
    fraction = _FRACTION if splits.hold_out is None else float(splits.hold_out)
    # Sorting by a hash shuffles without a generator, whose sequence may change with the library's version.
    order = sorted(range(count), key=lambda index: hashlib.sha256(str(index).encode()).digest())
    held = set(order[: int(count * fraction)])
    return [index for index in range(count) if index not in held], sorted(held)
