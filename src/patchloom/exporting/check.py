"""Whether a written file computes what its network does: on real images, at several batch and image sizes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images import crop, read_image, to_input, to_rgb
from patchloom.data.opening import open_source
from patchloom.data.samples import find_samples
from patchloom.errors import PatchloomError
from patchloom.exporting.formats import Request, Runner
from patchloom.inference.items import choose_items, held_out_by
from patchloom.inference.predict import expand_images
from patchloom.install import pip_install
from patchloom.models.network import Network
from patchloom.training.run import Run

BATCHES = (2, 5, 1)  # up and down: a runtime that keeps the shape of its last answer is found out
MANY = 64  # crops that int8 is judged on; of more pictures, so many from all over are read
AT_ONCE = 8

T = TypeVar("T")
Sizes = tuple[int, int, int]  # batch, height, width


@dataclass(frozen=True)
class Found:
    """How far a file is from its network."""

    difference: float  # the largest of any logit, as a part of the largest logit
    agreement: float  # the part of images with the same likeliest class
    images: int
    sizes: tuple[Sizes, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "difference": self.difference,
            "agreement": self.agreement,
            "images": self.images,
            "sizes": [list(size) for size in self.sizes],
        }


def find_pictures(given: str | PathLike[str] | None, model: Any = None) -> list[Image.Image]:
    """Those of a file, folder or pattern; or what the run of a model held out; or photos of installed packages."""
    if given is not None:
        paths = expand_images(given)
        if paths == [Path(given)] and paths[0].is_dir():
            raise PatchloomError(f"{given} has no image in it.")
        return [read_image(path) for path in _spread(paths)]
    pictures = _held_out(model) if isinstance(model, str | PathLike) else []
    if not pictures:
        photos = [sample for sample in find_samples().values() if not sample.pixelated]
        pictures = [to_rgb(Image.open(io.BytesIO(photo.data))) for photo in photos]
    if not pictures:
        raise PatchloomError(
            "There is no image to check the export with. Give some with --images DIR, or install scikit-learn, which "
            f"ships two photos: {pip_install('scikit-learn')}"
        )
    return pictures


def _held_out(model: str | PathLike[str]) -> list[Image.Image]:
    """What the run that a model comes from held out, where its data is still on this machine."""
    place = Path(model).resolve()
    for folder in (place, *place.parents[:2]):  # the run, its export or checkpoints, a file in them
        with suppress(PatchloomError, OSError, KeyError):
            run = Run.open(folder)
            where = run.about()["data"]["where"]
            if where == "digits" or Path(where).exists():
                source = open_source(where, run.settings.get("labels"))
                items, _ = choose_items(source, None, held_out_by(folder, where))
                return [source.read(item) for item in _spread(items)]
    return []


def _spread(things: list[T]) -> list[T]:
    """At most MANY of them, from all over the list."""
    return things[:: -(-len(things) // MANY)] if things else things


def crops(network: Network, pictures: Sequence[Image.Image], count: int, size: tuple[int, int], seed: int) -> Tensor:
    """(count, height, width, C) uint8: every picture as the network is tested on it, then parts of them."""
    draw = np.random.default_rng(seed)
    preprocessing = replace(network.preprocessing, img_size=size)
    rows = []
    for i in range(count):
        picture = pictures[(seed + i) % len(pictures)]
        if i >= len(pictures):
            width, height = (max(1, round(side * draw.uniform(0.3, 1))) for side in picture.size)
            left, top = draw.integers(picture.width - width + 1), draw.integers(picture.height - height + 1)
            picture = picture.crop((int(left), int(top), int(left) + width, int(top) + height))
        rows.append(np.asarray(crop(picture, preprocessing)))
    channels = np.arange(network.config.in_chans) % 3
    return torch.from_numpy(np.ascontiguousarray(np.stack(rows)[..., channels]))


def calibration_crops(network: Network, pictures: Sequence[Image.Image]) -> Tensor:
    """(MANY, height, width, C) uint8, other parts of the pictures than those of the check."""
    return crops(network, pictures, MANY, network.config.img_size, seed=len(pictures) + 1)


def check_batches(request: Request, pictures: Sequence[Image.Image]) -> Iterator[Tensor]:
    """Batches of 1, 2 and 5, at other sizes too where they are free; for int8 more images at its own size."""
    network = request.network
    patch, (height, width) = network.config.patch_size, network.config.img_size
    sizes = [(height, width)]
    if request.any_size:
        sizes += [(height + patch, width), (max(2, height // patch // 2) * patch, width + 2 * patch)]
    for number, size in enumerate(sizes):
        for batch in BATCHES:
            yield crops(network, pictures, batch, size, seed=number + batch)
    if request.int8:
        yield from crops(network, pictures, MANY, sizes[0], seed=0).split(AT_ONCE)


@torch.inference_mode()
def compare(request: Request, run: Runner, pictures: Sequence[Image.Image]) -> Found:
    network = request.network
    largest = furthest = 0.0
    same: list[bool] = []
    sizes: list[Sizes] = []
    for pixels in check_batches(request, pictures):
        logits = network(to_input(pixels, network.preprocessing))
        assert isinstance(logits, Tensor)
        want, got = logits.numpy(), np.asarray(run(request.as_input(pixels)))
        if not np.isfinite(want).all():
            raise PatchloomError(f"{network.config.name} gives no numbers for an image: its weights are damaged.")
        if got.shape != want.shape:
            raise PatchloomError(f"The file gives {got.shape} for {want.shape}: it is not written.")
        largest = max(largest, float(np.abs(want).max()))
        furthest = float(np.maximum(furthest, np.abs(got - want).max()))  # a number that is none stays
        same += (got.argmax(axis=1) == want.argmax(axis=1)).tolist()
        sizes.append((pixels.shape[0], pixels.shape[1], pixels.shape[2]))
    difference = furthest / largest if largest else furthest
    return Found(difference, sum(same) / len(same), len(same), tuple(dict.fromkeys(sizes)))
