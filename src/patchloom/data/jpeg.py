"""JPEG photos decoded by simplejpeg, where it is installed and its pixels are those that Pillow would give.

Both are libjpeg-turbo with the same transform and upsampling, but Pillow passes the pixels through Python in
pieces. What is not a plain upright photo in colour or grey, or not whole, is left to Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = (None, 1)
Box = tuple[int, int, int, int]  # left, top, right, bottom


@cache
def _simplejpeg() -> ModuleType | None:
    """None where it is missing, or where its pixels are not those of this Pillow, whose JPEG library may be another."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg if all(_alike(simplejpeg, progressive) for progressive in (False, True)) else None


def _alike(library: ModuleType, progressive: bool) -> bool:
    """Whether both decode a picture of noise, with its colours at half size, alike."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    # Sides that are not multiples of 16, so that incomplete blocks at the border are compared too.
    noise = noise.repeat(5, axis=0).repeat(3, axis=1)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=75, subsampling="4:2:0", progressive=progressive)
    with Image.open(file) as image:
        return np.array_equal(np.asarray(image), library.decode_jpeg(file.getvalue(), colorspace="RGB"))


def available() -> bool:
    """Whether JPEGs are decoded by simplejpeg here."""
    return _simplejpeg() is not None


def is_plain(header: Image.Image) -> bool:
    """Whether an image, of which Pillow has read the header, may be decoded here."""
    return (
        header.format == "JPEG"
        and header.mode in ("RGB", "L")
        and header.getexif().get(_ORIENTATION) in _UPRIGHT
        and available()
    )


def pixels_of(data: bytes, **options: int) -> np.ndarray | None:
    """(height, width, 4) uint8 RGBX of a plain JPEG; None where Pillow must decode it."""
    library = _simplejpeg()
    if library is None:
        return None
    try:  # strict: what libjpeg only warns of is an error here, and Pillow's to judge
        # Other colour spaces, such as CMYK, are Pillow's to convert.
        if library.decode_jpeg_header(data)[2] not in ("YCbCr", "Gray"):
            return None
        pixels: np.ndarray = library.decode_jpeg(data, colorspace="RGBX", strict=True, **options)
    except ValueError:
        return None
    return pixels


@dataclass(frozen=True)
class Encoded:
    """A plain JPEG that is decoded once it is known which part of it is wanted, and how large: cheaper, not exact."""

    data: bytes
    width: int
    height: int
    whole: Callable[[], Image.Image]  # for what turns out not to be plain

    def area(self, box: Box, size: tuple[int, int]) -> np.ndarray:
        """A box RGBX for a picture of `size` (height, width), at 1/2, 1/4 or 1/8 where it still has as many pixels.

        Returns:
            (height, width, 4) uint8, the pixels of the box at the chosen scale; not yet resized to `size`.
        """
        # libjpeg can decode at 1/2, 1/4 and 1/8 by leaving out frequencies, at a fraction of the time.
        smallest = min((box[2] - box[0]) / size[1], (box[3] - box[1]) / size[0])
        by = next(by for by in (8, 4, 2, 1) if smallest >= by or by == 1)
        least = {"min_height": -(-self.height // by), "min_width": -(-self.width // by)} if by > 1 else {}
        pixels = pixels_of(self.data, fastdct=True, fastupsample=True, **least)
        if pixels is None:
            pixels = np.asarray(self.whole().convert("RGBX"))
        across, down = pixels.shape[1] / self.width, pixels.shape[0] / self.height
        left, right = round(box[0] * across), round(box[2] * across)
        top, bottom = round(box[1] * down), round(box[3] * down)
        # At least one pixel, however small the box.
        return pixels[top : max(bottom, top + 1), left : max(right, left + 1)]
