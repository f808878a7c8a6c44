"""Verification of an exported file: its logits are compared with the network on real images and several sizes."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images import crop, read_image, to_input, to_rgb
from patchloom.data.opening import open_source
from patchloom.data.samples import find_samples
from patchloom.data.sources import spread
from patchloom.errors import PatchloomError
from patchloom.exporting.formats import Request, Runner
from patchloom.inference.items import choose_items, held_out_by
from patchloom.inference.predict import expand_images
from patchloom.install import pip_install
from patchloom.models.network import Network
from patchloom.training.run import Run

BATCHES = (2, 5, 1)  # growing and shrinking, to detect a runtime that keeps the shape of its last output
MANY = 64  # crops to verify int8 with; at most so many pictures are read
AT_ONCE = 8

Sizes = tuple[int, int, int]  # batch, height, width


@dataclass(frozen=True)
class Comparison:
    """Differences between a file and its network."""

    difference: float  # largest difference of a logit, relative to the largest logit
    agreement: float  # fraction of images with the same predicted class
    images: int
    sizes: tuple[Sizes, ...]
    unit: str = "images"  # what `images` counts: images or sentences

    def to_json(self) -> dict[str, Any]:
        return {
            "difference": self.difference,
            "agreement": self.agreement,
            "images": self.images,
            "sizes": [list(size) for size in self.sizes],
        }


def find_pictures(given: str | PathLike[str] | None, model: Any = None) -> list[Image.Image]:
    """Pictures of a file, folder or pattern; by default the validation images of the run that the model comes from, or
    photos of installed packages. Raises PatchloomError if there are none.

    Args:
        given: a file, folder or glob pattern; None for the default.
        model: what is exported; a path is searched for its run.
    """
    if given is not None:
        paths = expand_images(given)
        if paths == [Path(given)] and paths[0].is_dir():
            raise PatchloomError(f"{given} contains no images.")
        return [read_image(path) for path in spread(paths, MANY)]
    pictures = _held_out(model) if isinstance(model, str | PathLike) else []
    if not pictures:
        photos = [sample for sample in find_samples().values() if not sample.pixelated]
        pictures = [to_rgb(Image.open(io.BytesIO(photo.data))) for photo in photos]
    if not pictures:
        raise PatchloomError(
            "There are no images to verify the export with. Pass some with --images DIR, or install scikit-learn, "
            f"which includes two photos: {pip_install('scikit-learn')}"
        )
    return pictures


def _held_out(model: str | PathLike[str]) -> list[Image.Image]:
    """Validation images of the run that a model comes from, if its data is still on this machine."""
    if (run := Run.of(Path(model).resolve())) is None:
        return []
    with suppress(PatchloomError, OSError, KeyError):
        where = run.environment()["data"]["where"]
        if where == "digits" or Path(where).exists():
            source = open_source(where, run.settings.get("labels"))
            items, _ = choose_items(source, None, held_out_by(run.folder, where))
            return [source.read(item) for item in spread(items, MANY)]
    return []


def crops(network: Network, pictures: Sequence[Image.Image], count: int, size: tuple[int, int], seed: int) -> Tensor:
    """(count, height, width, C) uint8: every picture with the network's preprocessing, then random crops."""
    draw = np.random.default_rng(seed)
    preprocessing = replace(network.preprocessing, img_size=size)
    rows = []
    for i in range(count):
        # Another seed starts at another picture, so that few pictures still give different batches.
        picture = pictures[(seed + i) % len(pictures)]
        # Whole pictures first; then random parts of 30 to 100 % of each side, so that no two inputs are equal.
        if i >= len(pictures):
            width, height = (max(1, round(side * draw.uniform(0.3, 1))) for side in picture.size)
            left, top = draw.integers(picture.width - width + 1), draw.integers(picture.height - height + 1)
            picture = picture.crop((int(left), int(top), int(left) + width, int(top) + height))
        rows.append(np.asarray(crop(picture, preprocessing)))
    # networks with other than three channels get repeated RGB channels
    channels = np.arange(network.config.in_chans) % 3
    return torch.from_numpy(np.ascontiguousarray(np.stack(rows)[..., channels]))


def calibration_crops(network: Network, pictures: Sequence[Image.Image]) -> Tensor:
    """(MANY, height, width, C) uint8 for calibration, other crops than those of the verification."""
    return crops(network, pictures, MANY, network.config.img_size, seed=len(pictures) + 1)


def check_batches(request: Request, pictures: Sequence[Image.Image]) -> Iterator[Tensor]:
    """Batches of 1, 2 and 5 images, also of other sizes if the file supports them; for int8, more at the own size."""
    network = request.network
    height, width = network.config.img_size
    sizes = [(height, width)]
    if request.any_size:
        patch = network.config.patch_size
        # One size that is not square and larger, and one smaller in height: runtimes tend to fix either by accident.
        sizes += [(height + patch, width), (max(2, height // patch // 2) * patch, width + 2 * patch)]
    for number, size in enumerate(sizes):
        for batch in BATCHES:
            yield crops(network, pictures, batch, size, seed=number + batch)
    # int8 changes logits: what counts is how many predictions change, which takes more images.
    if request.int8:
        yield from crops(network, pictures, MANY, sizes[0], seed=0).split(AT_ONCE)


@torch.inference_mode()
def compare(request: Request, run: Runner, pictures: Sequence[Image.Image]) -> Comparison:
    """Run file and network on the same images; raises PatchloomError if logits are NaN or have another shape.

    Args:
        run: the exported file, as its users will call it.
        pictures: images that crops are made of.

    Returns:
        The largest difference over all batches, and the share of equal predictions.
    """
    network = request.network
    if request.device.type != "cpu":
        # A copy, since the network that is exported stays on the CPU.
        network = copy.deepcopy(network).to(request.device)
    largest = furthest = 0.0
    same: list[bool] = []
    sizes: list[Sizes] = []
    for pixels in check_batches(request, pictures):
        logits = network(to_input(pixels, network.preprocessing, request.device))
        assert isinstance(logits, Tensor)
        want, got = logits.cpu().numpy(), np.asarray(run(request.as_input(pixels)))
        if not np.isfinite(want).all():
            raise PatchloomError(f"The output of {network.config.name} is NaN: its weights are damaged.")
        if got.shape != want.shape:
            raise PatchloomError(
                f"The exported program returns {got.shape} instead of {want.shape}. Nothing was written."
            )
        largest = max(largest, float(np.abs(want).max()))
        furthest = float(np.maximum(furthest, np.abs(got - want).max()))  # np.maximum keeps NaN, max would not
        same += (got.argmax(axis=1) == want.argmax(axis=1)).tolist()
        sizes.append((pixels.shape[0], pixels.shape[1], pixels.shape[2]))
    # Relative to the largest logit: float32 rounding grows with it.
    difference = furthest / largest if largest else furthest
    return Comparison(difference, sum(same) / len(same), len(same), tuple(dict.fromkeys(sizes)))
