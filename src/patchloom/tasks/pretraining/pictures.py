"""Pictures in a report: images as data addresses, and maps on the grid of patches drawn over them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image
from torch import Tensor

from patchloom.models.preprocessing import Preprocessing

SIDE = 128  # pixels of a picture in the report
# dark blue over green to yellow: readable in grey and by the colour-blind
_COLOURS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=np.float64)


def figure(image: Image.Image, caption: str) -> str:
    """A picture with its caption, as HTML."""
    shown = image.resize((SIDE, max(1, round(SIDE * image.height / image.width))), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{escape(caption)}" src="{address}"><figcaption>{escape(caption)}</figcaption></figure>'


def row(figures: Sequence[str]) -> str:
    """Pictures side by side."""
    return f"<div class=photos>{''.join(figures)}</div>"


def to_pictures(images: Tensor, preprocessing: Preprocessing) -> list[Image.Image]:
    """Images (B, 3, height, width), normalised, as people see them."""
    mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    pixels = (images.detach().float() * std + mean).clamp(0, 1).mul(255).round().byte()
    return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]


def heat(values: Tensor) -> Image.Image:
    """A map (height, width) in colours, its smallest value dark and its largest bright."""
    numbers = values.detach().double().cpu().numpy()
    low, high = float(numbers.min()), float(numbers.max())
    share = (numbers - low) / (high - low) if high > low else np.zeros_like(numbers)
    place = share * (len(_COLOURS) - 1)
    below = np.minimum(place.astype(int), len(_COLOURS) - 2)
    part = (place - below)[..., None]
    return Image.fromarray((_COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part).round().astype(np.uint8))
