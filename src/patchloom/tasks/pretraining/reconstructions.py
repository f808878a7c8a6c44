"""Reconstructions in the report: what the network saw of an image, what it made of the rest, and the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from patchloom.models.preprocessing import Preprocessing
from patchloom.tasks.pretraining.patches import to_images
from patchloom.tasks.pretraining.pictures import figure, row
from patchloom.training.report import Section

_GREY = 0.5


def reconstruction_section(
    pictures: Sequence[Image.Image],
    patches: Tensor,
    predicted: Tensor,
    masked: Tensor,
    preprocessing: Preprocessing,
    note: str,
) -> Section:
    """Three images for each picture: without the masked patches, with predicted ones in their place, and the whole.

    Args:
        pictures: The images as people see them.
        patches: All patches (B, N, p * p * C), normalised, as `to_patches` gives them.
        predicted: Those of the masked patches (B, M, p * p * C), in the same units.
        masked: Their indices (B, M).
        preprocessing: Mean and standard deviation of the channels.
        note: What the prediction is, a sentence.
    """
    per_patch = patches.shape[-1] // len(preprocessing.mean)
    mean, std = (torch.tensor(values).repeat(per_patch) for values in (preprocessing.mean, preprocessing.std))
    pixels, places = patches * std + mean, masked[:, :, None].expand_as(predicted)
    seen = _as_images(pixels.scatter(1, places, _GREY), preprocessing.img_size)
    filled = _as_images(pixels.scatter(1, places, predicted * std + mean), preprocessing.img_size)
    rows = [
        row([figure(first, "seen"), figure(second, "predicted"), figure(picture, "image")])
        for first, second, picture in zip(seen, filled, pictures, strict=True)
    ]
    return "Reconstructions", f"<p>{note}</p>{'<hr>'.join(rows)}"


def _as_images(patches: Tensor, img_size: tuple[int, int]) -> list[Image.Image]:
    """Patches (B, N, p * p * 3) with pixels from 0 to 1 as images of `img_size`."""
    size = round((img_size[0] * img_size[1] / patches.shape[1]) ** 0.5)
    grid = img_size[0] // size, img_size[1] // size
    images = to_images(patches, size, grid).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)
    return [Image.fromarray(image) for image in images.numpy()]
