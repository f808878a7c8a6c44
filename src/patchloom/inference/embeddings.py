"""Embeddings of many images: the vectors of `embed`, of any data source or of single images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.data.collating import collate
from patchloom.data.decoding import decode_picture
from patchloom.data.images import as_picture, crop, to_input
from patchloom.data.loader import eval_batches
from patchloom.data.scan import pixel_digest, reason_of
from patchloom.data.sources import Item, Source
from patchloom.data.workers import load_batches
from patchloom.devices import Device, device_of, pins_memory
from patchloom.errors import PatchloomError
from patchloom.inference.models import Model, open_fused
from patchloom.inference.predict import check_batch, expand_all, in_equal_shapes
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing

BATCH = 64
DIGEST = 32  # hexadecimal digits that identify an image's content


def embed(model: Model, images: Any, *, batch: int = BATCH, device: Device = "auto") -> np.ndarray:
    """The embeddings of images, (N, D) float32, in their order.

    Of a Grafit run that is the output of the projector, of any other network the vector before the head. `images` is
    one or several of: a file, a folder (all images in it), a glob pattern, a PIL image, an array (height, width, 3) of
    uint8, a tensor (C, height, width). The vectors are not normalised.

    Raises:
        PatchloomError: An image cannot be read, or an embedding is NaN.
    """
    check_batch(batch)
    network = open_fused(model, device=device)
    waiting, rows = expand_all(images), list[np.ndarray]()
    while some := list(islice(waiting, batch)):
        pictures = [crop(as_picture(image), network.preprocessing) for image in some]
        rows.append(in_equal_shapes(lambda pixels: embed_pixels(network, pixels, network.preprocessing), pictures))
    if not rows:
        raise PatchloomError("No image was given to embed.")
    return np.concatenate(rows)


@torch.inference_mode()
def embed_pixels(network: Network, pixels: Tensor, preprocessing: Preprocessing) -> np.ndarray:
    """Cropped images (B, height, width, 3) uint8 -> (B, D) float32."""
    vectors = network.embed(to_input(pixels, preprocessing, device_of(network))).float().cpu().numpy()
    if not np.isfinite(vectors).all():
        raise PatchloomError(f"{network.config.name} gives embeddings that are NaN: its weights are damaged.")
    return vectors


def embeddings(
    network: Network,
    source: Source,
    items: Sequence[Item],
    preprocessing: Preprocessing,
    batch: int = 128,
    workers: int = 0,
) -> np.ndarray:
    """The embeddings of items of a source, (N, D) float32, in the order of the items."""
    pin = pins_memory(device_of(network))
    batches = eval_batches(source, range(len(items)), items, preprocessing, batch, workers, pin)
    return np.concatenate([embed_pixels(network, images, preprocessing) for images, _ in batches])


class Embedded(NamedTuple):
    """A batch of items: vectors (B, D) float32, zeros for images that cannot be read; the digest of each image's
    content; and the reasons of those that cannot be read, by place in the batch."""

    vectors: np.ndarray
    digests: list[str]
    unreadable: dict[int, str]


def embed_items(
    network: Network, source: Source, items: Sequence[Item], batch: int = BATCH, workers: int = 0, start: int = 0
) -> Iterator[Embedded]:
    """Embed items of a source in batches, from item `start` on. Every file is read once, for its digest and its pixels;
    images that cannot be read are reported, not raised."""
    batches = [list(range(first, min(first + batch, len(items)))) for first in range(start, len(items), batch)]
    loaded = load_batches(_Images(source, items, network.preprocessing), batches, workers, collate=_collate)
    for pixels, digests, unreadable in loaded:
        vectors = np.zeros((len(digests), 0), np.float32)
        if pixels is not None:
            some = embed_pixels(network, pixels, network.preprocessing)
            vectors = np.zeros((len(digests), some.shape[1]), np.float32)
            vectors[[place for place in range(len(digests)) if place not in unreadable]] = some
        yield Embedded(vectors, digests, unreadable)


def content_digest(data: bytes | None, image: Image.Image | None = None) -> str:
    """What identifies an image: its encoded bytes, or its pixels where there are none."""
    if data is not None:
        return hashlib.sha256(data).hexdigest()[:DIGEST]
    assert image is not None
    return pixel_digest(image).hex()[:DIGEST]


class _Images(Dataset[Any]):
    """(pixels, digest, None), or (None, digest, reason) for an image that cannot be read."""

    def __init__(self, source: Source, items: Sequence[Item], preprocessing: Preprocessing) -> None:
        self.source, self.items, self.preprocessing = source, items, preprocessing

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> tuple[np.ndarray | Tensor | None, str, str | None]:
        item, digest = self.items[place], ""
        try:
            data = self.source.data(item)
            if data is None:
                picture: Any = self.source.read(item)
                digest = content_digest(None, picture)
            else:
                digest = content_digest(data)
                picture = decode_picture(data, item.key)
            return crop(picture, self.preprocessing), digest, None
        except (PatchloomError, MemoryError) as error:
            return None, digest, reason_of(error)


def _collate(samples: list[tuple[Any, str, str | None]]) -> tuple[Tensor | None, list[str], dict[int, str]]:
    good = [pixels for pixels, _, reason in samples if reason is None]
    unreadable = {place: reason for place, (_, _, reason) in enumerate(samples) if reason is not None}
    return (collate(good) if good else None), [digest for _, digest, _ in samples], unreadable
