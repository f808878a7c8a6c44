"""Steps from a decoded photo to a training image in C++, with the very pixels of Pillow's steps.

A picture is an array (height, width, 4) of uint8, RGBX: the fourth byte has no meaning. Whether the pixels are those of
the installed Pillow is tried once per process; if not, or without the compiled library, Pillow does the work.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from patchloom.kernels import libraries

LIBRARY = "pictures-avx2"
CUBIC = {Image.Resampling.BILINEAR: 0, Image.Resampling.BICUBIC: 1}
_WIDEST_BLUR = 1000.0  # pixels
ENHANCERS: dict[Callable[..., Any], int] = {ImageEnhance.Brightness: 0, ImageEnhance.Contrast: 1, ImageEnhance.Color: 2}
_SIGNATURES = {  # of pictures.cpp, a letter an argument
    "resize": "pnnnnpnnnn",
    "mirror": "pnn",
    "take": "pnppnpn",
    "grey": "pn",
    "solarise": "pn",
    "enhance": "pnnf",
    "blur": "pnnf",
    "pack": "ppn",
    "normalise": "ppnpp",
}


def available() -> bool:
    return why_not() is None


@cache
def why_not() -> str | None:
    """Why Pillow does the work here, as a sentence; None when C++ does."""
    if reason := libraries.why_not(LIBRARY):
        return reason
    # Pillow changes its rounding between versions: rather the slower Pillow than training that depends on the machine.
    other = _unequal_steps()
    return f"The C++ picture steps differ from this Pillow's ({', '.join(other)})." if other else None


@cache
def _library() -> ctypes.CDLL:
    return libraries.open_library(LIBRARY, _SIGNATURES)


def _check(picture: np.ndarray) -> None:
    """A picture that may be changed in place: C++ takes its memory as it is."""
    sound = picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2:] == (4,) and picture.size > 0
    _require(sound and picture.flags.c_contiguous and picture.flags.writeable, picture)


def _require(sound: bool, picture: np.ndarray | Tensor, what: str = "") -> None:
    """Refuse arguments with which C++ would read or write beyond a picture."""
    if not sound:
        raise ValueError(f"not a step for a picture {tuple(picture.shape)} of {picture.dtype} {what}".rstrip())


def resize(area: np.ndarray, size: tuple[int, int], resampling: Image.Resampling) -> np.ndarray:
    """An area of a picture, (h, w, 3 or 4), to (height, width, 4) of `size`; its rows may lie apart.

    Args:
        resampling: BILINEAR or BICUBIC; with a kernel that widens when shrinking, as Pillow's.
    """
    _require(area.dtype == np.uint8 and area.ndim == 3 and area.shape[2:] in ((3,), (4,)) and area.size > 0, area)
    _require(min(size) > 0, area, f"resized to {size}")
    height, width, channels = area.shape
    # C++ takes a row stride only: pixels and channels of a row must follow one another.
    if area.strides[1:] != (channels, 1):
        area = np.ascontiguousarray(area)
    order = _down_first(width, height, size)
    out = np.empty((*size, 4), np.uint8)
    _library().patchloom_resize(
        area.ctypes.data,
        area.strides[0],
        channels,
        width,
        height,
        out.ctypes.data,
        size[1],
        size[0],
        CUBIC[resampling],
        order,
    )
    return out


def _down_first(width: int, height: int, size: tuple[int, int]) -> bool:
    """Pillow 13 begins with the height where that shrinks by more than twice as many pixels as the width."""
    shrinks = height - size[0]
    return shrinks > 0 and shrinks > 2 * (width - size[1]) and _pillow_may_begin_with_height()


@cache
def _pillow_may_begin_with_height() -> bool:
    # Tried on an example: a version number says nothing about a Pillow that a distribution has patched.
    noise = Image.fromarray(_noise(40, 9))
    across_first = noise.resize((20, 40), Image.Resampling.BICUBIC).resize((20, 8), Image.Resampling.BICUBIC)
    return noise.resize((20, 8), Image.Resampling.BICUBIC).tobytes() != across_first.tobytes()


def take(picture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The picture of these rows and columns, int64."""
    _check(picture)
    for places, side in ((rows, picture.shape[0]), (columns, picture.shape[1])):
        sound = places.dtype == np.int64 and places.ndim == 1 and places.flags.c_contiguous
        _require(sound and (not places.size or 0 <= places.min() <= places.max() < side), picture, f"places {places}")
    out = np.empty((len(rows), len(columns), 4), np.uint8)
    _library().patchloom_take(
        picture.ctypes.data,
        picture.shape[1],
        out.ctypes.data,
        rows.ctypes.data,
        len(rows),
        columns.ctypes.data,
        len(columns),
    )
    return out


def mirror(picture: np.ndarray) -> np.ndarray:
    """Swap left and right. This and the following steps work in place and return the same array."""
    _check(picture)
    _library().patchloom_mirror(picture.ctypes.data, picture.shape[1], picture.shape[0])
    return picture


def grey(picture: np.ndarray) -> np.ndarray:
    """ITU-R 601 luma in all three channels, as Pillow's "L"."""
    _check(picture)
    _library().patchloom_grey(picture.ctypes.data, picture.size // 4)
    return picture


def solarise(picture: np.ndarray) -> np.ndarray:
    """Invert values from 128 on."""
    _check(picture)
    _library().patchloom_solarise(picture.ctypes.data, picture.size)
    return picture


def enhance(picture: np.ndarray, enhancer: Callable[..., Any], factor: float) -> np.ndarray:
    """What Pillow's enhancer (Brightness, Contrast or Color) does by this factor."""
    _check(picture)
    _require(math.isfinite(factor), picture, f"factor {factor}")
    _library().patchloom_enhance(picture.ctypes.data, picture.size // 4, ENHANCERS[enhancer], factor)
    return picture


def blur(picture: np.ndarray, sigma: float) -> np.ndarray:
    """Pillow's Gaussian: three boxes."""
    _check(picture)
    _require(0 <= sigma <= _WIDEST_BLUR, picture, f"sigma {sigma}")
    _library().patchloom_blur(picture.ctypes.data, picture.shape[1], picture.shape[0], _box_radius(sigma))
    return picture


def _box_radius(sigma: float) -> float:
    """Of three equal boxes with the Gaussian's variance in all, in single precision where Pillow has it."""
    f = np.float32
    # Pillow computes this in C floats; in double precision some radii would differ in the last bit, and so would
    # pixels.
    variance = f(sigma) * f(sigma) / f(3)
    inner = f(math.floor((float(f(math.sqrt(12.0 * float(variance) + 1.0))) - 1.0) / 2.0))
    rest = (f(2) * inner + f(1)) * (inner * (inner + f(1)) - f(3) * variance)
    return float(inner + rest / (f(6) * (variance - (inner + f(1)) * (inner + f(1)))))


def pack(picture: np.ndarray) -> np.ndarray:
    """(height, width, 3) RGB."""
    picture = np.ascontiguousarray(picture)
    _require(picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2:] == (4,), picture)
    out = np.empty((*picture.shape[:2], 3), np.uint8)
    _library().patchloom_pack(picture.ctypes.data, out.ctypes.data, picture.size // 4)
    return out


def normalise(images: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """(B, height, width, 3) uint8 -> the same in float32, each channel less its mean, divided by its scale."""
    values = (mean, scale)
    _require(images.dtype == torch.uint8 and images.ndim > 0 and images.shape[-1] == 3 and images.is_cpu, images)
    sound = all(v.dtype == torch.float32 and v.shape == (3,) and v.is_contiguous() and v.is_cpu for v in values)
    _require(sound, images, f"mean {mean} and scale {scale}")
    images = images.contiguous()
    out = torch.empty(images.shape, dtype=torch.float32)
    _library().patchloom_normalise(
        images.data_ptr(), out.data_ptr(), images.numel() // 3, mean.data_ptr(), scale.data_ptr()
    )
    return out


def _unequal_steps() -> list[str]:
    """The steps whose pixels are not those of the Pillow that is installed, tried on noise."""
    noise = _noise(61, 47)
    image = Image.fromarray(noise)
    pairs = {
        f"{kernel.name.lower()} {w}x{h}": (resize(noise, (h, w), kernel), image.resize((w, h), kernel))
        for kernel in CUBIC
        for w, h in ((24, 24), (90, 90), (61, 24), (47, 61), (40, 90), (90, 20))
    }

    def fresh() -> np.ndarray:
        return resize(noise, noise.shape[:2], Image.Resampling.BICUBIC)

    pairs["mirror"] = mirror(fresh()), ImageOps.mirror(image)
    pairs["grey"] = grey(fresh()), ImageOps.grayscale(image).convert("RGB")
    pairs["solarise"] = solarise(fresh()), ImageOps.solarize(image, 128)
    for sigma in (0.1, 0.6, 1.1, 1.9):
        pairs[f"blur {sigma}"] = blur(fresh(), sigma), image.filter(ImageFilter.GaussianBlur(sigma))
    for enhancer in ENHANCERS:
        for factor in (0.7, 1.3):
            pairs[f"{enhancer.__name__} {factor}"] = enhance(fresh(), enhancer, factor), enhancer(image).enhance(factor)
    return [name for name, (ours, theirs) in pairs.items() if pack(ours).tobytes() != theirs.tobytes()]


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
