"""Open the images that a name stands for: a folder, a CSV manifest, an archive or the digits."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.data.digits import open_digits
from patchloom.data.folders import open_folder
from patchloom.data.huggingface import open_saved
from patchloom.data.listing import LAYOUTS, TARGETS, Labels
from patchloom.data.manifest import open_manifest
from patchloom.data.own import is_dataset, open_own
from patchloom.data.shards import open_shards
from patchloom.data.sources import DEFAULT_COLUMN, Source
from patchloom.data.torchvision_sets import open_torchvision
from patchloom.errors import PatchloomError, did_you_mean


def open_source(where: Any, labels: Labels = None, targets: str = "class", validation: Any = None) -> Source:
    """The images at `where`: a folder, a CSV manifest, "digits", an archive (PREFIX:REST) or a dataset of your own.

    labels       the column of labels, where there are several; "genus,species" or a list gives several columns
    targets      "class": every image needs a class. "none": images without labels are accepted, and labels are kept
                 where the data has them

    validation   beside a dataset of your own, a second one to hold out

    A source that is open is returned as it is. What cannot be opened is a `PatchloomError`.
    """
    if targets not in TARGETS:
        raise PatchloomError(f"Unknown targets {targets!r}. Choose from: {', '.join(TARGETS)}.")
    if isinstance(where, Source):
        return where
    if not isinstance(where, (str, PathLike)):
        return _open_own(where, labels, targets, validation)
    if validation is not None:
        raise PatchloomError("A validation dataset is for a dataset of your own; data on disk has its own splits.")
    name = os.fspath(where)
    # The operating system would end the name at the NUL byte, and open another file.
    if not name or "\0" in name:
        what = "a name with a NUL byte" if name else "an empty name"
        raise PatchloomError(f"There is no data with {what}.", *LAYOUTS)
    # Only of a str: Path("digits") is a folder of that name.
    if isinstance(where, str):
        if name == "digits":
            _refuse_labels(name, labels)
            return open_digits()
        prefix, _, rest = name.partition(":")
        if prefix in ("torchvision", "wds", "hf"):
            return _open_archive(prefix, rest, labels, targets)
    path = Path(name).expanduser()
    if path.is_dir():
        _refuse_labels(name, labels)
        return open_folder(name, path, targets)
    if path.is_file():
        return open_manifest(name, path, labels, targets)
    if path.exists():
        raise PatchloomError(f"{name} is neither a folder nor a regular file.", *LAYOUTS)
    raise PatchloomError(f"{name} does not exist.{_near(path)}", *LAYOUTS)


def _open_own(dataset: Any, labels: Labels, targets: str, validation: Any) -> Source:
    if not is_dataset(dataset):
        raise PatchloomError(
            f"Data is a path, a name or a dataset with __len__ and __getitem__, not {type(dataset).__name__}."
        )
    _refuse_labels(type(dataset).__name__, labels)
    return open_own(dataset, validation, targets)


def _open_archive(prefix: str, rest: str, labels: Labels, targets: str) -> Source:
    """The source that `prefix:rest` names."""
    if prefix == "torchvision":
        return open_torchvision(rest, labels)
    if not rest:
        raise PatchloomError(f"{prefix}: needs a path, as in {prefix}:/data/flowers.")
    return open_shards(rest, labels, targets) if prefix == "wds" else open_saved(rest, labels, targets)


def _refuse_labels(name: str, labels: Labels) -> None:
    """Refuse a label column of data that has labels without a name, or none."""
    if labels not in (None, DEFAULT_COLUMN):
        raise PatchloomError(
            f"Labels {labels!r}: only a CSV manifest, wds:, hf: and some sets of torchvision have label columns; "
            f"{name} has none."
        )


def _near(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""
