"""Pictures of reconstructions for the report: the image, what the network saw of it, and what it made of the rest."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.models.preprocessing import Preprocessing
from patchloom.tasks.pretraining.reconstruction import to_images
from patchloom.training.report import Section

_SIDE = 128  # pixels of the shorter side, to which smaller images are enlarged
_GREY = 0.5
_NOTE = (
    "Each picture: what the encoder saw, the prediction in place of the masked patches, and the image. Where the decoder "
    "predicts normalised pixels, its patches are drawn with the mean and the contrast of the true ones."
)


def reconstruction_section(
    pictures: Sequence[Image.Image],
    patches: Tensor,
    predicted: Tensor,
    masked: Tensor,
    preprocessing: Preprocessing,
    size: int,
) -> Section:
    """Three images side by side for each picture.

    Args:
        pictures: The images as people see them.
        patches: Normalised pixels of all patches (B, N, P).
        predicted: Those of the masked patches (B, M, P).
        masked: Their indices (B, M).
        preprocessing: The mean and standard deviation of the channels.
        size: Of a patch, in pixels.
    """
    grid = preprocessing.img_size[0] // size, preprocessing.img_size[1] // size
    mean, std = (torch.tensor(values).repeat(size**2) for values in (preprocessing.mean, preprocessing.std))
    pixels = patches * std + mean
    places = masked[:, :, None].expand_as(predicted)
    seen = pixels.scatter(1, places, _GREY)
    filled = pixels.scatter(1, places, predicted * std + mean)
    rows = (_as_images(part, size, grid) for part in (seen, filled))
    strips = (_strip([*pair, picture]) for *pair, picture in zip(*rows, pictures, strict=True))
    figures = "".join(f'<img alt="seen, predicted, image" src="{_address(strip)}"> ' for strip in strips)
    return "Reconstructions", f"<p>{_NOTE}</p><div>{figures}</div>"


def _as_images(patches: Tensor, size: int, grid: tuple[int, int]) -> list[Image.Image]:
    """Patches of pixels from 0 to 1 as images."""
    images = to_images(patches, size, grid).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)
    return [Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in images.cpu().numpy()]


def _strip(images: Sequence[Image.Image]) -> Image.Image:
    """Images side by side, each as large as the first, small ones enlarged by a whole factor."""
    width, height = images[0].size
    factor = max(1, _SIDE // min(width, height))
    gap = 2
    whole = np.full((height * factor, (width * factor + gap) * len(images) - gap, 3), 255, np.uint8)
    for place, image in enumerate(images):
        large = image.convert("RGB").resize((width * factor, height * factor), Image.Resampling.NEAREST)
        left = place * (width * factor + gap)
        whole[:, left : left + width * factor] = np.asarray(large)
    return Image.fromarray(whole)


def _address(image: Image.Image) -> str:
    """A data address: the report is one file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
