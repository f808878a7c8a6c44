"""Open the images that a name stands for: a folder, a CSV manifest, an archive or the digits."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from patchloom.data.digits import open_digits
from patchloom.data.folders import open_folder
from patchloom.data.huggingface import open_saved
from patchloom.data.listing import LAYOUTS
from patchloom.data.manifest import open_manifest
from patchloom.data.shards import open_shards
from patchloom.data.sources import Source
from patchloom.data.torchvision_sets import open_torchvision
from patchloom.errors import PatchloomError, did_you_mean


def open_source(where: str | PathLike[str], labels: str | None = None) -> Source:
    """The labelled images at `where`: a folder, a CSV manifest, "digits", or an archive (PREFIX:REST).

    `labels` names the column of labels where there are several.
    """
    name = os.fspath(where)
    if not name or "\0" in name:
        what = "a name with a NUL byte" if name else "an empty name"
        raise PatchloomError(f"There is no data with {what}.", *LAYOUTS)
    if isinstance(where, str):
        if name == "digits":
            _refuse_labels(name, labels)
            return open_digits()
        prefix, _, rest = name.partition(":")
        if prefix in ("torchvision", "wds", "hf"):
            return _open_archive(prefix, rest, labels)
    path = Path(name).expanduser()
    if path.is_dir():
        _refuse_labels(name, labels)
        return open_folder(name, path)
    if path.is_file():
        return open_manifest(name, path, labels)
    if path.exists():
        raise PatchloomError(f"{name} is neither a folder nor a regular file.", *LAYOUTS)
    raise PatchloomError(f"{name} does not exist.{_near(path)}", *LAYOUTS)


def _open_archive(prefix: str, rest: str, labels: str | None) -> Source:
    """The source that `prefix:rest` names."""
    if prefix == "torchvision":
        return open_torchvision(rest, labels)
    if not rest:
        raise PatchloomError(f"{prefix}: needs a path, as in {prefix}:/data/flowers.")
    return open_shards(rest, labels) if prefix == "wds" else open_saved(rest, labels)


def _refuse_labels(name: str, labels: str | None) -> None:
    if labels is not None:
        raise PatchloomError(
            f"Labels {labels!r}: only a CSV manifest, wds: and hf: have label columns; {name} has none."
        )


def _near(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""
