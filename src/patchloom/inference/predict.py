"""`predict`: the most likely classes of many images."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchloom.data.collating import collate
from patchloom.data.decoding import EXTENSIONS
from patchloom.data.images import NOTE, as_picture, crop, to_input
from patchloom.data.scan import reason_of
from patchloom.devices import Device, device_of
from patchloom.errors import PatchloomError
from patchloom.inference.models import Model, check_head, open_fused
from patchloom.models.class_names import names_or_indices
from patchloom.models.network import Network


def predict(
    model: Model,
    images: Any,
    *,
    top: int = 5,
    batch: int = 64,
    base: Model | None = None,
    device: Device = "auto",
) -> list[dict[str, Any]]:
    """For each image, in order, {path, predictions: [{class, probability}]} or {path, error}; with a `note` where
    float or 32-bit values were scaled to 8 bits.

    `images` is one or several of: a file, a folder (all images in it), a glob pattern, a PIL image, an array
    (height, width, 3) of uint8, a tensor (C, height, width), which is used as it is. The path of an image that is not
    a file is None. `base` is that of a delta; `device` is the accelerator of this machine by default, else the CPU.

    Raises:
        PatchloomError: the model cannot be opened. Images that cannot be read are rows with an error.
    """
    if not isinstance(top, int) or top < 1:
        raise PatchloomError(f"top must be a whole number of at least 1, not {top!r}.")
    check_batch(batch)
    network = open_fused(model, base=base, device=device)
    check_head(network, model if isinstance(model, str | PathLike) else network.config.name)
    waiting, rows = expand_all(images), list[dict[str, Any]]()
    # At most `batch` images are open at a time, however many files a folder has.
    while some := list(islice(waiting, batch)):
        rows += _predict_batch(network, some, top)
    return rows


def check_batch(batch: int) -> None:
    """Refuse a batch without images, which would end before the first of them."""
    if not isinstance(batch, int) or batch < 1:
        raise PatchloomError(f"batch must be at least 1, not {batch!r}.")


def expand_all(images: Any) -> Iterator[Any]:
    """One image or several, one after the other: paths, with the files of folders and patterns, or images as they are.
    Of the pairs (image, target) of a dataset, the image."""
    if isinstance(images, str | PathLike | Image.Image) or getattr(images, "ndim", 0) == 3:
        images = [images]
    if hasattr(images, "__len__") and hasattr(images, "__getitem__") and not isinstance(images, Mapping):
        given = (images[i] for i in range(len(images)))  # a dataset may know no end otherwise
    elif isinstance(images, Iterable) and not isinstance(images, Mapping):
        given = (image for image in images)
    else:
        given = (as_picture(image) for image in [images])  # which says what an image is
    for one in given:
        image = one[0] if isinstance(one, tuple) and one else one
        yield from expand_images(image) if isinstance(image, str | PathLike) else [image]


def expand_images(given: str | PathLike[str]) -> list[Path]:
    """The files that a file, a folder or a glob pattern stands for."""
    path = Path(given or "''")  # an empty name, too, becomes a row with an error, and not the current folder
    try:
        path.exists()
    except (OSError, ValueError):  # a name that no file can have becomes a row with an error
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS and not _hidden(p, path))
        return found or [path]
    if not path.exists() and glob.has_magic(os.fspath(given)):
        matches = sorted(Path(match) for match in glob.glob(os.fspath(given), recursive=True))
        return [match for match in matches if not match.is_dir()] or [path]
    return [path]  # what is not an image, or does not exist, becomes a row with an error


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _predict_batch(network: Network, images: list[Any], top: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pictures = []
    for image in images:
        row: dict[str, Any] = {"path": str(image) if isinstance(image, Path) else None}
        try:
            if isinstance(image, Path) and os.path.isdir(image):  # as `expand_images` leaves it
                raise PatchloomError("the folder contains no images")
            picture = as_picture(image)
            pictures.append(crop(picture, network.preprocessing))
            row |= {"note": note} if (note := getattr(picture, "info", {}).get(NOTE)) else {}
        except (ValueError, MemoryError) as error:  # ours among them
            row["error"] = reason_of(error)
        rows.append(row)
    if pictures:
        good = [row for row in rows if "error" not in row]
        found = in_equal_shapes(lambda pixels: class_probabilities(network, pixels), pictures)
        for row, probabilities in zip(good, found, strict=True):
            if np.isfinite(probabilities).all():
                row["predictions"] = best_classes(network, probabilities, top)
            else:
                row["error"] = f"{network.config.name} gives NaN for it: its weights are damaged."
    return rows


def in_equal_shapes(function: Callable[[Any], np.ndarray], pictures: Sequence[Any]) -> np.ndarray:
    """(B, ...): `function` of pictures, those of one shape together. Tensors, which are not resized, may differ."""
    places: dict[Any, list[int]] = {}
    for i, picture in enumerate(pictures):
        places.setdefault((picture.dtype, tuple(picture.shape)), []).append(i)
    parts = [function(collate([pictures[i] for i in some])) for some in places.values()]
    # The parts are in the order of the shapes: sorting by place restores that of the pictures.
    order = np.argsort(np.concatenate(list(places.values())))
    return np.concatenate(parts)[order]


@torch.inference_mode()
def class_probabilities(network: Network, pictures: np.ndarray | torch.Tensor) -> np.ndarray:
    """Pictures (B, height, width, C) uint8, resized and cropped -> (B, classes)."""
    logits = network(to_input(pictures, network.preprocessing, device_of(network)))
    assert isinstance(logits, torch.Tensor)
    return logits.float().softmax(dim=-1).cpu().numpy()


def best_classes(network: Network, probabilities: np.ndarray, top: int) -> list[dict[str, Any]]:
    """The likeliest classes of one image, [{class, probability}]; classes without a name are numbered."""
    names = names_or_indices(network.class_names, len(probabilities))
    # A stable sort: of equal probabilities the lower index comes first, on every machine.
    order = np.argsort(-probabilities, kind="stable")[:top]
    return [{"class": names[i], "probability": float(probabilities[i])} for i in order]
