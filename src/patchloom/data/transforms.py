"""From a photo to a training image of uint8, every draw from the image's own generator.

Order: crop, flip, small affine moves, policy (RandAugment, AutoAugment, TrivialAugment, 3-Augment), colour jitter.
Normalising, erasing and mixing follow on the device, for a whole batch (data/mixing.py).

Images of Pillow's are the plain form of every step; arrays RGBX take the same steps in C++, to the same pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from patchloom.compat import import_timm
from patchloom.data import native
from patchloom.data.images import FILTERS, Picture, to_image
from patchloom.data.jpeg import Box, Encoded
from patchloom.data.randomness import seeded_globals

FILL = (124, 116, 104)  # ImageNet's mean colour, behind what geometric moves leave empty
Size = tuple[int, int]
Drawn = Image.Image | np.ndarray  # in Pillow's hands, or RGBX in C++'s


@dataclass(frozen=True, kw_only=True)
class Augment:
    """The fields of a recipe that decide what happens to a training image; see Recipe for their meaning."""

    crop: str = "rrc"
    crop_scale: float = 0.08
    flip: float = 0.5
    augmentation: str = "none"
    three_augment: tuple[str, ...] = ("gray", "solarize", "blur")
    magnitude: float = 9.0
    color_jitter: float = 0.0
    affine: float = 0.0
    interpolation: str = "bicubic"
    pixels: str = "exact"

    def __call__(self, image: Picture, size: Size, seed: int) -> np.ndarray:
        """An image as (height, width, 3) uint8 of `size`."""
        draw, how = random.Random(seed), FILTERS[self.interpolation]
        image = _in_hand(image, how)
        if self.crop == "rrc":
            image = random_resized_crop(image, size, draw, how, self.crop_scale)
        elif self.crop == "pad":
            image = padded_crop(image, size, draw, how)
        else:
            image = simple_random_crop(image, size, draw, how, x_only=self.crop == "src_axis")
        if draw.random() < self.flip:
            image = native.mirror(image) if isinstance(image, np.ndarray) else ImageOps.mirror(image)
        if self.affine:
            image = small_affine(_as_image(image), draw, self.affine)
        if self.augmentation == "three":
            image = one_of_three(image, draw, self.three_augment)
        elif self.augmentation != "none":
            policy = _policy(self.augmentation, self.magnitude)
            with seeded_globals(draw.getrandbits(63)):
                image = policy(_as_image(image))
        if self.color_jitter:
            image = jitter(image, draw, self.color_jitter)
        return native.pack(image) if isinstance(image, np.ndarray) else np.asarray(image)


def _in_hand(image: Picture, how: Image.Resampling) -> Picture:
    """An image in the form that the steps take: C++'s where it can do them, else Pillow's; or still encoded."""
    if isinstance(image, Encoded):
        return image
    if _is_native(how):
        return np.asarray(image)
    return _as_image(image)


def _is_native(how: Image.Resampling) -> bool:
    return native.available() and how in native.CUBIC


def _as_image(image: Drawn) -> Image.Image:
    return to_image(image) if isinstance(image, np.ndarray) else image


def random_resized_crop(
    image: Picture, size: Size, draw: random.Random, how: Image.Resampling, least: float = 0.08
) -> Drawn:
    """A crop of an area U(least, 1) and a log-uniform aspect 3/4 to 4/3, ten tries, then the centre; resized."""
    width, height = _sides(image)
    for _ in range(10):
        area = width * height * draw.uniform(least, 1)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    return _resized(image, (left, top, left + w, top + h), size, how)


def simple_random_crop(
    image: Picture, size: Size, draw: random.Random, how: Image.Resampling, pad: int = 4, x_only: bool = False
) -> Drawn:
    """DeiT III's simple random crop: the shorter side to S, four pixels of reflection all round, an S x S crop; with
    `x_only` random along the x-axis alone, as the text says, and central along the other."""
    (height, width), (from_width, from_height) = size, _sides(image)
    scale = max(height / from_height, width / from_width)
    to_size = (max(height, int(from_height * scale)), max(width, int(from_width * scale)))
    resized = _resized(image, (0, 0, from_width, from_height), to_size, how)
    pad = min(pad, min(to_size) - 1)
    free = to_size[0] + 2 * pad - height
    top = free // 2 if x_only else draw.randint(0, free)
    left = draw.randint(0, to_size[1] + 2 * pad - width)
    rows = np.pad(np.arange(to_size[0]), pad, mode="reflect")[top : top + height]
    columns = np.pad(np.arange(to_size[1]), pad, mode="reflect")[left : left + width]
    if isinstance(resized, np.ndarray):
        return native.take(resized, rows, columns)
    return Image.fromarray(np.asarray(resized)[np.ix_(rows, columns)])


def padded_crop(image: Picture, size: Size, draw: random.Random, how: Image.Resampling, pad: int = 4) -> Drawn:
    """The crop of the published code for images of up to 32 pixels: four black pixels all round, a random S x S crop.
    An image of another size is resized to S first."""
    width, height = _sides(image)
    pixels = np.asarray(_resized(image, (0, 0, width, height), size, how))
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    top, left = draw.randint(0, 2 * pad), draw.randint(0, 2 * pad)
    cut = np.ascontiguousarray(padded[top : top + size[0], left : left + size[1]])
    return cut if _is_native(how) else Image.fromarray(cut)


def _sides(image: Picture) -> tuple[int, int]:
    """Width and height."""
    return (image.shape[1], image.shape[0]) if isinstance(image, np.ndarray) else (image.width, image.height)


def _resized(image: Picture, box: Box, size: Size, how: Image.Resampling) -> Drawn:
    """A box of an image at another size."""
    if isinstance(image, Image.Image):
        return image.crop(box).resize((size[1], size[0]), how)
    left, top, right, bottom = box
    area = image.area(box, size) if isinstance(image, Encoded) else image[top:bottom, left:right]
    return native.resize(area, size, how) if _is_native(how) else to_image(area).resize((size[1], size[0]), how)


def small_affine(image: Image.Image, draw: random.Random, strength: float) -> Image.Image:
    """Rotation by up to 90 degrees times `strength`, zoom and shift by up to that share; the corners' mean behind."""
    angle = math.radians(90 * strength * draw.uniform(-1, 1))
    zoom = 1 + strength * draw.uniform(-1, 1)
    dx, dy = (strength * side * draw.uniform(-1, 1) for side in image.size)
    cx, cy = (image.width - 1) / 2, (image.height - 1) / 2
    cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
    matrix = (cos, sin, cx - cos * (cx + dx) - sin * (cy + dy), -sin, cos, cy + sin * (cx + dx) - cos * (cy + dy))
    pixels = np.asarray(image)
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=0).round().astype(int)
    fill = tuple(int(value) for value in corners)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def one_of_three(image: Drawn, draw: random.Random, names: tuple[str, ...] = ("gray", "solarize", "blur")) -> Drawn:
    """3-Augment's first part: exactly one of grey, solarised from 128 on, and blurred with a radius of U(0.1, 2); or
    of some of them (Table 6.2)."""
    choice = ("gray", "solarize", "blur").index(names[draw.randrange(len(names))])
    radius = draw.uniform(0.1, 2) if choice == 2 else 0
    if isinstance(image, np.ndarray):
        return (native.grey, native.solarise, partial(native.blur, sigma=radius))[choice](image)
    if choice == 0:
        return ImageOps.grayscale(image).convert("RGB")
    if choice == 1:
        return ImageOps.solarize(image, 128)
    return image.filter(ImageFilter.GaussianBlur(radius))


def jitter(image: Drawn, draw: random.Random, strength: float) -> Drawn:
    """Brightness, contrast and saturation by factors of U(1 - strength, 1 + strength), in a random order; no hue."""
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    draw.shuffle(enhancers)
    for enhancer in enhancers:
        factor = draw.uniform(max(0, 1 - strength), 1 + strength)
        if isinstance(image, np.ndarray):
            image = native.enhance(image, enhancer, factor)
        else:
            image = enhancer(image).enhance(factor)
    return image


@lru_cache
def _policy(name: str, magnitude: float) -> Callable[[Image.Image], Image.Image]:
    """Policies of timm and torchvision; they draw from the global generators."""
    import_timm()  # first: it makes torchvision importable on a CPU
    if name == "trivial":
        theirs = import_module("torchvision.transforms")
        return theirs.TrivialAugmentWide(interpolation=theirs.InterpolationMode.BICUBIC, fill=list(FILL))
    timms = import_module("timm.data.auto_augment")
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    if name == "auto":
        policy = timms.auto_augment_transform("original", hparams)
        ops = [op for group in policy.policy for op in group]
    else:
        policy = timms.rand_augment_transform(f"rand-m{magnitude:g}-mstd0.5-inc1", hparams)
        ops = policy.ops
    for op in ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = _posterize
    return policy


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """At the largest magnitude timm keeps 0 bits, which newer Pillow refuses: a black image."""
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits >= 1 else Image.new("RGB", image.size)
