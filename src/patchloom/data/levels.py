"""Label columns as the levels of a hierarchy, such as genus above species."""

from __future__ import annotations

from collections.abc import Mapping

from patchloom.data.sources import Source
from patchloom.errors import PatchloomError


def parents(source: Source, fine: str, coarse: str) -> list[int]:
    """For each class of the column `fine`, the index of its class in `coarse`; -1 for a class without images.

    The source must have been opened with both columns. A fine class in more than one coarse class is refused.
    """
    for column in (fine, coarse):
        source.with_labels(column)  # names a column that is missing
    above = [-1] * len(source.columns[fine])
    example = [""] * len(above)
    for item in source.items():
        labels = item.target if isinstance(item.target, Mapping) else {fine: item.target}
        child, parent = labels[fine], labels[coarse]
        if above[child] == -1:
            above[child], example[child] = parent, item.key
        elif above[child] != parent:
            names = source.columns[coarse]
            raise PatchloomError(
                f"{source.where}: the class {source.columns[fine][child]!r} of {fine} lies in more than one class of "
                f"{coarse}: {names[above[child]]!r} ({example[child]}) and {names[parent]!r} ({item.key}). Give each "
                f"class of {fine} one class of {coarse}, or rename one of them."
            )
    return above
