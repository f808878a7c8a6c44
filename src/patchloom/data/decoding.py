"""Encoded images to pixels, RGB and upright: which formats, which errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import IO, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from patchloom.data import jpeg
from patchloom.data.images import Picture, check_proportions, read_image, to_image
from patchloom.errors import PatchloomError

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif"}
)

# A file is opened by what it contains, whatever its name says, and Pillow hands some formats to other programs.
_FORMATS = frozenset({"JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF"})

Opener = Callable[[bytes], IO[bytes]]


class UnreadableImage(PatchloomError):
    """An image that cannot be decoded; `reason` says why, without the name of the file."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


def decode(data: bytes | None, name: str, opener: Opener = io.BytesIO) -> Image.Image:
    """An encoded image, RGB and upright; `name` is for the error, `opener` makes the files that Pillow reads."""
    picture = decode_picture(data, name, opener=opener)
    return to_image(picture) if isinstance(picture, np.ndarray) else cast(Image.Image, picture)


def decode_picture(data: bytes | None, name: str, fast: bool = False, opener: Opener = io.BytesIO) -> Picture:
    """The same as an array RGBX, or still encoded, where that is possible; see `Source.picture`."""
    try:
        if not data:
            raise ValueError("the file is empty")
        image = open_header(data, opener)
        if jpeg.is_plain(image):
            if fast:
                return jpeg.Encoded(data, *image.size, lambda: decode(data, name))
            if (pixels := jpeg.pixels_of(data)) is not None:
                return pixels
        if image.mode == "P" and "transparency" in image.info:  # Pillow warns if such a palette goes straight to RGB
            return ImageOps.exif_transpose(image).convert("RGBA").convert("RGB")
        return read_image(opener(data))  # type: ignore[arg-type] # Pillow takes files too
    except Exception as error:  # damaged files make Pillow's decoders raise errors of every kind
        reason = _reason(error, data)
        raise UnreadableImage(f"{name} cannot be read as an image: {reason}", reason) from error


def open_header(data: bytes, opener: Opener = io.BytesIO) -> Image.Image:
    """The image with nothing decoded yet, unless its format is unknown or it has more pixels than Pillow deems safe.

    Pillow itself only warns of an image between its limit and twice its limit.
    """
    image = Image.open(opener(data), formats=readable_formats(_FORMATS))
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width} x {image.height} pixels are more than Pillow's limit of {limit}")
    check_proportions(image)
    return image


@cache
def readable_formats(names: frozenset[str]) -> tuple[str, ...]:
    """Those that this Pillow was built with; it must have loaded its plugins before it may be asked for some."""
    Image.init()
    return tuple(sorted(names & set(Image.OPEN)))


def _reason(error: BaseException, data: bytes | None) -> str:
    if isinstance(error, PatchloomError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnidentifiedImageError):
        return f"no image format that is read here; it begins with {(data or b'')[:12]!r}"
    if isinstance(error, (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
