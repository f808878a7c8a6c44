"""Encoded images to pixels, RGB and upright: which formats, which errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from os import PathLike
from typing import IO, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from patchloom.data import jpeg
from patchloom.data.images import Picture, check_proportions, to_image, to_rgb
from patchloom.errors import PatchloomError
from patchloom.install import pip_install
from patchloom.reading import read_file

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".heic", ".heif", ".hif"}
)
MOST_BYTES = 512 << 20  # of an encoded image: as many as Pillow's limit of pixels takes with 16 bits per channel

# The content of a file decides its format, not its name. For some formats Pillow would start other programs.
_FORMATS = frozenset({"JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "HEIF"})
# formats that not every installation reads: extensions, first bytes after "ftyp", what reads them, how to get it
_OPTIONAL = {
    "HEIF": ((".heic", ".heif", ".hif"), (b"he", b"mif1", b"msf1"), "pillow-heif", ("pillow-heif",)),
    "AVIF": ((".avif",), (b"avi",), "Pillow", ("--upgrade", "pillow")),
}

Opener = Callable[[bytes], IO[bytes]]


class UnreadableImage(PatchloomError):
    """An image that cannot be decoded; `reason` says why, without the name of the file."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


def read_encoded(path: str | PathLike[str], name: str = "") -> bytes:
    """The bytes of an image file; one that is missing, too large or not a regular file is an `UnreadableImage`."""
    try:
        return read_file(path, MOST_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreadableImage(f"{name or path} cannot be read as an image: {reason}", reason) from error


def decode(data: bytes | None, name: str, opener: Opener = io.BytesIO) -> Image.Image:
    """An encoded image, RGB and upright; `name` is for the error, `opener` makes the files that Pillow reads."""
    picture = decode_picture(data, name, opener=opener)
    return to_image(picture) if isinstance(picture, np.ndarray) else cast(Image.Image, picture)


def decode_picture(data: bytes | None, name: str, fast: bool = False, opener: Opener = io.BytesIO) -> Picture:
    """The same as an array RGBX, or still encoded, where that is possible; see `Source.picture`.

    Args:
        fast: keep a plain JPEG encoded, so that it can be decoded at a smaller size.

    Raises:
        UnreadableImage: empty, damaged, of an unknown format, or with too many pixels.
    """
    try:
        if not data:
            raise ValueError("the file is empty")
        image = open_header(data, opener)
        # The fast way for the most frequent case; whatever it does not take falls through to Pillow below.
        if jpeg.is_plain(image):
            if fast:
                return jpeg.Encoded(data, *image.size, lambda: decode(data, name))
            if (pixels := jpeg.pixels_of(data)) is not None:
                return pixels
        if image.mode == "P" and "transparency" in image.info:  # Pillow warns if such a palette goes straight to RGB
            return ImageOps.exif_transpose(image).convert("RGBA").convert("RGB")
        return to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # damaged files make Pillow's decoders raise errors of every kind
        reason = _reason(error, data)
        raise UnreadableImage(f"{name} cannot be read as an image: {reason}", reason) from error


def open_header(data: bytes, opener: Opener = io.BytesIO) -> Image.Image:
    """The image with nothing decoded yet, unless its format is unknown or it has more pixels than Pillow deems safe.

    Pillow itself only warns of an image between its limit and twice its limit.
    """
    # A list of formats keeps Pillow from starting other programs, such as Ghostscript for EPS.
    image = Image.open(opener(data), formats=readable_formats(_FORMATS))
    limit = Image.MAX_IMAGE_PIXELS
    # The header is enough to refuse a decompression bomb: a few kilobytes that decode to gigabytes.
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width} x {image.height} pixels are more than Pillow's limit of {limit}")
    check_proportions(image)
    return image


@cache
def readable_formats(names: frozenset[str]) -> tuple[str, ...]:
    """Those that can be read here; Pillow must have loaded its plugins before it may be asked for some."""
    Image.init()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return tuple(sorted(names & set(Image.OPEN)))


@cache
def unreadable_extensions() -> dict[str, str]:
    """Extensions of images that cannot be read here, each with the command that changes it."""
    missing = set(_OPTIONAL) - set(readable_formats(_FORMATS))
    return {extension: pip_install(*_OPTIONAL[name][3]) for name in sorted(missing) for extension in _OPTIONAL[name][0]}


def _reason(error: BaseException, data: bytes | None) -> str:
    if isinstance(error, UnidentifiedImageError):
        return _unknown_format(data or b"")
    if isinstance(error, (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _unknown_format(data: bytes) -> str:
    for name, (_, brands, reader, words) in _OPTIONAL.items():
        # HEIF and AVIF are boxes of the ISO media format: size, "ftyp", then the brand.
        if data[4:8] == b"ftyp" and data[8:12].startswith(brands):
            if name in readable_formats(_FORMATS):
                return f"a {name} photo that {reader} cannot read: it is damaged"
            return f"a {name} photo; to read it: {pip_install(*words)}"
    return f"not an image in a supported format; the file starts with {data[:12]!r}"
