"""The crops of DINO: two global ones and several local ones, each with colours, blur and solarisation of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from patchloom.data import native
from patchloom.data.images import FILTERS, Picture, as_image
from patchloom.data.jpeg import Encoded
from patchloom.data.transforms import Drawn, Size, Views, random_resized_crop
from patchloom.recipes.recipe import Recipe

JITTERED = 0.8  # probability of other colours (published code)
BLURRED = (1.0, 0.1, 0.5)  # probability of blur: first and second global crop, local crops (published code)
_LEAST_RADIUS = 0.1
_HUES = 256


@dataclass(frozen=True, kw_only=True)
class Crop:
    """One crop as the published code makes it: random resized crop, flip, colour jitter, grey, blur, solarise."""

    scale: tuple[float, float]  # of the image's area
    flip: float
    jitter: tuple[float, float, float]  # strengths: brightness and contrast, saturation, hue
    gray: float
    blurred: float  # probability of blur
    blur: float  # its largest radius
    solarize: float
    interpolation: str = "bicubic"

    def __call__(self, picture: Picture, size: Size, seed: int) -> np.ndarray | Tensor:
        """A picture as (height, width, 3) uint8 of `size`, every draw from `seed`; a tensor is used as it is."""
        if isinstance(picture, Tensor):
            return picture
        draw, resampling = random.Random(seed), FILTERS[self.interpolation]
        still = picture if isinstance(picture, Encoded) or native.available() else as_image(picture)
        still = np.asarray(still) if isinstance(still, Image.Image) and native.available() else still
        image = random_resized_crop(still, size, draw, resampling, *self.scale)
        if draw.random() < self.flip:
            image = native.mirror(image) if isinstance(image, np.ndarray) else ImageOps.mirror(image)
        if draw.random() < JITTERED:
            image = jitter_colours(image, draw, *self.jitter)
        if draw.random() < self.gray:
            image = native.grey(image) if isinstance(image, np.ndarray) else ImageOps.grayscale(image).convert("RGB")
        if draw.random() < self.blurred and self.blur:
            image = _blur(image, draw.uniform(min(_LEAST_RADIUS, self.blur), self.blur))
        if draw.random() < self.solarize:
            image = native.solarise(image) if isinstance(image, np.ndarray) else ImageOps.solarize(image, 128)
        return native.pack(image) if isinstance(image, np.ndarray) else np.asarray(image)


def _blur(image: Drawn, radius: float) -> Drawn:
    if isinstance(image, np.ndarray):
        return native.blur(image, radius)
    return image.filter(ImageFilter.GaussianBlur(radius))


def jitter_colours(image: Drawn, draw: random.Random, strength: float, saturation: float, hue: float) -> Drawn:
    """Brightness and contrast by factors of U(1 - strength, 1 + strength), saturation likewise, hue shifted by up to
    `hue` of the circle, in a random order; steps of strength 0 are left out."""
    steps: list[Any] = [
        (ImageEnhance.Brightness, strength), (ImageEnhance.Contrast, strength), (ImageEnhance.Color, saturation),
        (None, hue),
    ]  # fmt: skip
    draw.shuffle(steps)
    for enhancer, amount in steps:
        if not amount:
            continue
        if enhancer is None:
            image = shift_hue(image, draw.uniform(-amount, amount))
            continue
        factor = draw.uniform(max(0, 1 - amount), 1 + amount)
        if isinstance(image, np.ndarray):
            image = native.enhance(image, enhancer, factor)
        else:
            image = enhancer(image).enhance(factor)
    return image


def shift_hue(image: Drawn, shift: float) -> Drawn:
    """Hue moved by a fraction of the circle, in Pillow's HSV."""
    hue, saturation, value = as_image(image).convert("HSV").split()
    moved = hue.point([(i + round(shift * _HUES)) % _HUES for i in range(_HUES)])
    shifted = Image.merge("HSV", (moved, saturation, value)).convert("RGB")
    return np.array(shifted.convert("RGBX")) if isinstance(image, np.ndarray) else shifted


@dataclass(frozen=True)
class CropViews:
    """A transform for `Samples`: the crops of an image without its label."""

    views: Views

    def __call__(self, picture: Any, item: Any, seed: int) -> tuple[Any, ...]:
        return self.views(picture, item, seed)[0]


def crop_views(recipe: Recipe, size: Size, local_size: Size, flips: bool) -> CropViews:
    """Two global crops of `size` and `local_crops` local ones of `local_size`."""
    shared: dict[str, Any] = {
        "flip": recipe.flip if flips else 0.0, "gray": recipe.gray,
        "jitter": (recipe.color_jitter, recipe.saturation, recipe.hue), "blur": recipe.blur,
        "interpolation": recipe.interpolation,
    }  # fmt: skip
    whole = (recipe.crop_scale, 1.0)
    first = Crop(scale=whole, blurred=BLURRED[0], solarize=0.0, **shared)
    second = Crop(scale=whole, blurred=BLURRED[1], solarize=recipe.solarize, **shared)
    local = Crop(scale=tuple(recipe.local_scale), blurred=BLURRED[2], solarize=0.0, **shared)
    locals_ = ((local, local_size),) * recipe.local_crops
    return CropViews(Views(((first, size), (second, size), *locals_)))
