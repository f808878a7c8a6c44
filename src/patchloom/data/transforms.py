"""From a photo to a training image of uint8, every draw from the image's own generator.

Order: crop, flip, small affine moves, policy (RandAugment, AutoAugment, TrivialAugment, 3-Augment), colour jitter.
Normalising, erasing and mixing follow on the device, for a whole batch (data/mixing.py).

Images of Pillow's are the plain form of every step; arrays RGBX take the same steps in C++, to the same pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from patchloom.compat import import_timm
from patchloom.data import native
from patchloom.data.images import FILTERS, Picture, to_image
from patchloom.data.jpeg import Box, Encoded
from patchloom.data.parts import THREE_AUGMENT
from patchloom.data.randomness import seeded_globals, view_seed
from patchloom.data.sources import Item

FILL = (124, 116, 104)  # ImageNet's mean colour, behind what geometric moves leave empty
Size = tuple[int, int]
Drawn = Image.Image | np.ndarray  # an image of Pillow's, or an array RGBX for the steps in C++
Still = Drawn | Encoded  # the same before its crop, perhaps still encoded


@dataclass(frozen=True, kw_only=True)
class Augment:
    """The fields of a recipe that decide what happens to a training image; see Recipe for their meaning."""

    crop: str = "rrc"
    crop_scale: float = 0.08
    flip: float = 0.5
    augmentation: str = "none"
    three_augment: tuple[str, ...] = THREE_AUGMENT
    magnitude: float = 9.0
    color_jitter: float = 0.0
    affine: float = 0.0
    interpolation: str = "bicubic"
    pixels: str = "exact"

    def __call__(self, picture: Picture, size: Size, seed: int) -> np.ndarray | Tensor:
        """A picture as (height, width, 3) uint8 of `size`; a tensor is used as it is.

        Args:
            picture: of any size; a plain JPEG may still be encoded.
            size: (height, width) of the result.
            seed: decides every draw; the draws come in a fixed order.
        """
        if isinstance(picture, Tensor):
            return picture
        draw, resampling = random.Random(seed), FILTERS[self.interpolation]
        image = _ready(picture, resampling)
        if self.crop == "rrc":
            image = random_resized_crop(image, size, draw, resampling, self.crop_scale)
        elif self.crop == "pad":
            image = pad_and_crop(image, size, draw, resampling)
        else:
            image = simple_random_crop(image, size, draw, resampling, one_axis=self.crop == "src_axis")
        if draw.random() < self.flip:
            image = native.mirror(image) if isinstance(image, np.ndarray) else ImageOps.mirror(image)
        if self.affine:
            image = small_affine(_as_image(image), draw, self.affine)
        if self.augmentation == "three":
            image = one_of_three(image, draw, self.three_augment)
        elif self.augmentation != "none":
            policy = _policy(self.augmentation, self.magnitude)
            # Policies of other libraries draw from global generators: these are seeded from the image's own.
            with seeded_globals(draw.getrandbits(63)):
                image = policy(_as_image(image))
        if self.color_jitter:
            image = jitter(image, draw, self.color_jitter)
        return native.pack(image) if isinstance(image, np.ndarray) else np.asarray(image)


class Augmentation(Protocol):
    """What turns a picture into a training image of `size`, drawn from `seed`: `Augment`, or a user's own."""

    def __call__(self, picture: Picture, size: Size, seed: int) -> np.ndarray | Tensor: ...


@dataclass(frozen=True)
class OneView:
    """A transform for `Samples`: one augmented image (height, width, 3) uint8, and its label."""

    augment: Augmentation
    size: Size

    def __call__(self, picture: Picture, item: Item, seed: int) -> tuple[np.ndarray | Tensor, int]:
        return self.augment(picture, self.size, seed), item.label


@dataclass(frozen=True)
class Views:
    """A transform for `Samples`: several images of one picture, each with an augmentation and size of its own, drawn
    independently, and the target of the item."""

    views: tuple[tuple[Augmentation, Size], ...]

    def __call__(self, picture: Picture, item: Item, seed: int) -> tuple[tuple[np.ndarray | Tensor, ...], Any]:
        images = (augment(picture, size, view_seed(seed, i)) for i, (augment, size) in enumerate(self.views))
        return tuple(images), item.target


def _ready(image: Still, resampling: Image.Resampling) -> Still:
    """An image in the form that the steps take: C++'s where it can do them, else Pillow's; or still encoded."""
    if isinstance(image, Encoded):
        return image
    if _is_native(resampling):
        return np.asarray(image)
    return _as_image(image)


def _is_native(resampling: Image.Resampling) -> bool:
    return native.available() and resampling in native.CUBIC


def _as_image(image: Drawn) -> Image.Image:
    return to_image(image) if isinstance(image, np.ndarray) else image


def random_resized_crop(
    image: Still,
    size: Size,
    draw: random.Random,
    resampling: Image.Resampling,
    least: float = 0.08,
    most: float = 1.0,
) -> Drawn:
    """A crop of an area U(least, most) and a log-uniform aspect 3/4 to 4/3, ten tries, then the centre; resized."""
    width, height = _sides(image)
    for _ in range(10):
        # As in Inception: aspects are drawn in the logarithm, so that 3/4 and 4/3 are equally likely.
        area = width * height * draw.uniform(least, most)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            break
    else:
        # The largest box in the centre with an aspect between 3/4 and 4/3.
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    return _resized(image, (left, top, left + w, top + h), size, resampling)


def simple_random_crop(
    image: Still, size: Size, draw: random.Random, resampling: Image.Resampling, pad: int = 4, one_axis: bool = False
) -> Drawn:
    """DeiT III's simple random crop: the shorter side to S, four pixels of reflection all round, an S x S crop.

    The published code draws the place along both axes. `one_axis` is the form of the text (thesis chapter 6): along the
    x-axis only, in the middle of the height.
    """
    height, width = size
    resized, to_size = _covering(image, size, resampling)
    # Reflection needs more pixels than it adds.
    pad = min(pad, min(to_size) - 1)
    spare = to_size[0] + 2 * pad - height
    top = spare // 2 if one_axis else draw.randint(0, spare)
    left = draw.randint(0, to_size[1] + 2 * pad - width)
    # Padding indices instead of pixels: only the crop itself is ever copied.
    rows = np.pad(np.arange(to_size[0]), pad, mode="reflect")[top : top + height]
    columns = np.pad(np.arange(to_size[1]), pad, mode="reflect")[left : left + width]
    if isinstance(resized, np.ndarray):
        return native.take(resized, rows, columns)
    return Image.fromarray(np.asarray(resized)[np.ix_(rows, columns)])


def pad_and_crop(image: Still, size: Size, draw: random.Random, resampling: Image.Resampling, pad: int = 4) -> Drawn:
    """Four black pixels all round, then an S x S crop: the published code's crop of 32-pixel images (CIFAR).

    An image whose shorter side is not S is resized to it first; one of S pixels keeps its pixels.
    """
    height, width = size
    resized, to_size = _covering(image, size, resampling)
    top, left = draw.randint(0, to_size[0] + 2 * pad - height), draw.randint(0, to_size[1] + 2 * pad - width)
    padded = np.pad(np.asarray(resized), ((pad, pad), (pad, pad), (0, 0)))
    crop = np.ascontiguousarray(padded[top : top + height, left : left + width])
    return crop if isinstance(resized, np.ndarray) else Image.fromarray(crop)


def _covering(image: Still, size: Size, resampling: Image.Resampling) -> tuple[Drawn, Size]:
    """The whole image resized so that it just covers `size`, and its own size."""
    (height, width), (from_width, from_height) = size, _sides(image)
    scale = max(height / from_height, width / from_width)
    to_size = (max(height, int(from_height * scale)), max(width, int(from_width * scale)))
    return _resized(image, (0, 0, from_width, from_height), to_size, resampling), to_size


def _sides(image: Still) -> tuple[int, int]:
    """Width and height."""
    return (image.shape[1], image.shape[0]) if isinstance(image, np.ndarray) else (image.width, image.height)


def _resized(image: Still, box: Box, size: Size, resampling: Image.Resampling) -> Drawn:
    """A box of an image at another size."""
    if isinstance(image, Image.Image):
        return image.crop(box).resize((size[1], size[0]), resampling)
    left, top, right, bottom = box
    area = image.area(box, size) if isinstance(image, Encoded) else image[top:bottom, left:right]
    return (
        native.resize(area, size, resampling)
        if _is_native(resampling)
        else to_image(area).resize((size[1], size[0]), resampling)
    )


def small_affine(image: Image.Image, draw: random.Random, strength: float) -> Image.Image:
    """Rotation by up to 90 degrees times `strength`, zoom and shift by up to that share; the corners' mean behind."""
    angle = math.radians(90 * strength * draw.uniform(-1, 1))
    zoom = 1 + strength * draw.uniform(-1, 1)
    dx, dy = (strength * side * draw.uniform(-1, 1) for side in image.size)
    cx, cy = (image.width - 1) / 2, (image.height - 1) / 2
    # Pillow wants the inverse map, from output to input pixels; rotation is about the centre of the image.
    cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
    matrix = (cos, sin, cx - cos * (cx + dx) - sin * (cy + dy), -sin, cos, cy + sin * (cx + dx) - cos * (cy + dy))
    pixels = np.asarray(image)
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=0).round().astype(int)
    fill = tuple(int(value) for value in corners)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def one_of_three(image: Drawn, draw: random.Random, parts: Sequence[str] = THREE_AUGMENT) -> Drawn:
    """3-Augment's first part: exactly one of grey, solarised from 128 on, and blurred with a radius of U(0.1, 2).
    `parts` names those to choose from, with equal probabilities (thesis Table 6.2)."""
    choice = parts[draw.randrange(len(parts))]
    radius = draw.uniform(0.1, 2) if choice == "blur" else 0
    if isinstance(image, np.ndarray):
        steps: dict[str, Callable[..., np.ndarray]] = {
            "gray": native.grey,
            "solarize": native.solarise,
            "blur": partial(native.blur, sigma=radius),
        }
        return steps[choice](image)
    if choice == "gray":
        return ImageOps.grayscale(image).convert("RGB")
    if choice == "solarize":
        return ImageOps.solarize(image, 128)
    return image.filter(ImageFilter.GaussianBlur(radius))


def jitter(image: Drawn, draw: random.Random, strength: float) -> Drawn:
    """Brightness, contrast and saturation by factors of U(1 - strength, 1 + strength), in a random order; no hue.

    The steps are applied one after the other and each rounds to bytes, as Pillow does.
    """
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
        # DeiT's setting: magnitude noise 0.5, and operations whose strength increases with the magnitude.
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
