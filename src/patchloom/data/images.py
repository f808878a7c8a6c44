"""From an image file to a network's input."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchloom.data.collating import collate
from patchloom.data.jpeg import Encoded
from patchloom.data.mixing import normalise
from patchloom.devices import to_device
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing

FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
}

# an RGB image of Pillow's, an array (height, width, 4) uint8 RGBX, a JPEG, or a tensor (C, height, width) of a user's
# own dataset, which every step passes on as it is
Picture = Image.Image | np.ndarray | Encoded | Tensor
NOTE = "patchloom note"  # of an image's info
LONGEST = 100  # times as long as wide: resized by its shorter side, a thin line would grow without bound


def check_proportions(image: Image.Image) -> None:
    """Raise ValueError for an image that is more than 100 times as long as wide."""
    if max(image.size) > LONGEST * max(1, min(image.size)):
        raise ValueError(f"it is more than {LONGEST} times as long as wide: {image.width} x {image.height}")


def read_image(path: str | PathLike[str]) -> Image.Image:
    """An RGB image, upright whatever its EXIF orientation says."""
    from patchloom.data.decoding import decode, read_encoded  # they build on this file

    return decode(read_encoded(path), str(path))


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image as RGB. Pixels of more than 8 bits are scaled; where that took a decision, `info[NOTE]` tells it."""
    image.info.pop(NOTE, None)  # what a file may say under this name is not ours
    # Pillow's own conversion of "I" and "F" to RGB clips at 255: most 16-bit images would become white.
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    pixels, note = _to_8_bits(np.asarray(image))
    scaled = Image.fromarray(pixels).convert("RGB")
    if note:
        scaled.info[NOTE] = note
    return scaled


def _to_8_bits(values: np.ndarray) -> tuple[np.ndarray, str | None]:
    """Integers of 16 or 32 bits, or floats, as uint8, and how they were scaled.

    Values that fill more than half of 0 to 1 (floats) or of 16 bits keep that range, as do images of a single value;
    8-bit values stay as they are; others are stretched from their least to their greatest. 16-bit files that fill
    their range need no note.
    """
    low, high = float(values.min()), float(values.max())
    if not np.isfinite((low, high)).all():
        raise ValueError("it holds values that are not finite")
    whole = values.dtype.kind in "iu"
    if whole and low < 0:
        raise ValueError(f"it holds negative integers, from {low:g} on; save it with 8 or 16 bits per channel")
    top = 65535 if whole else 1
    # 65535 = 255 x 257: the whole range maps onto 0 to 255.
    if values.dtype == np.uint16 and high > top / 2:
        return (values // 257).astype(np.uint8), None
    single = low == high and (255 if whole else 0) < high <= top
    if single or (low >= 0 and top / 2 < high <= top):
        low, high = 0, top
    elif low >= 0 and high <= 255 and (whole or bool((values == np.rint(values)).all())):
        return values.astype(np.uint8), None
    elif low == high:
        raise ValueError(f"all its values are {low:g}: there is no range to scale by")
    # float32 has too few digits for large integers, and the range of large floats overflows it. In place, since an
    # image can have 90 million pixels.
    scaled = values.astype(np.float64)
    scaled -= low
    scaled *= 255 / (high - low)
    return np.rint(scaled, out=scaled).astype(np.uint8), f"values from {low:g} to {high:g} scaled to 8 bits"


def as_image(picture: Image.Image | np.ndarray | Encoded) -> Image.Image:
    """A picture in any form as an RGB image of Pillow's."""
    if isinstance(picture, Image.Image):
        return picture
    return picture.whole() if isinstance(picture, Encoded) else to_image(picture)


def to_image(picture: np.ndarray) -> Image.Image:
    """An array RGBX as an image of Pillow's."""
    height, width = picture.shape[:2]
    return Image.frombytes("RGB", (width, height), np.ascontiguousarray(picture), "raw", "RGBX")


def as_picture(value: Any) -> Image.Image | Tensor:
    """An image that is given in Python, RGB and upright: a path, a PIL image, or an array (height, width, 3) of uint8.

    A tensor (C, height, width) is returned as it is. Anything else is a `PatchloomError`.
    """
    if isinstance(value, (str, PathLike)):
        return read_image(value)
    if isinstance(value, Tensor):
        return _checked_tensor(value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise PatchloomError(
                f"An array is an image if it is (H, W, 3) of uint8, not {value.shape} of {value.dtype}."
            )
        return Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise PatchloomError(
            "An image is a path, a PIL image, an array (H, W, 3) of uint8 or a tensor (C, H, W), not "
            f"{type(value).__name__}."
        )
    if not value.width or not value.height:
        raise PatchloomError(f"The image is empty: {value.width} x {value.height} pixels.")
    try:
        return to_rgb(ImageOps.exif_transpose(value))
    except (OSError, ValueError, SyntaxError) as error:  # Pillow decodes a file that it has opened only now
        raise PatchloomError(f"The image cannot be read: {error}.") from error


def _checked_tensor(value: Tensor) -> Tensor:
    if value.ndim != 3 or not value.numel():
        raise PatchloomError(f"A tensor is an image if it is (C, H, W), not {tuple(value.shape)}.")
    return value if value.is_floating_point() else value.float()


def to_batch(
    pictures: Sequence[Picture], preprocessing: Preprocessing, device: torch.device | str | None = None
) -> Tensor:
    """The input of a network for RGB pictures, as evaluation makes it: (B, 3, height, width) float32 on the device."""
    if len(preprocessing.mean) != 3 and not all(isinstance(picture, Tensor) for picture in pictures):
        raise PatchloomError(f"This network takes {len(preprocessing.mean)} channels; a photo has 3.")
    return to_input(collate([crop(picture, preprocessing) for picture in pictures]), preprocessing, device)


def to_input(
    images: np.ndarray | Tensor, preprocessing: Preprocessing, device: torch.device | str | None = None
) -> Tensor:
    """Cropped images (B, height, width, C) uint8 -> (B, C, height, width) float32 on the device, with the mean
    subtracted and divided by std. Images of a floating-point type are used as they are."""
    batch = torch.from_numpy(images) if isinstance(images, np.ndarray) else images
    if device is not None:
        batch = to_device(batch, torch.device(device))  # before the numbers grow to four bytes each
    return batch if batch.is_floating_point() else normalise(batch, preprocessing.mean, preprocessing.std)


def prepare(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """The input of a network for one RGB image, (1, 3, height, width), as evaluation makes it."""
    return to_batch([image], preprocessing).contiguous()


def crop(picture: Picture, preprocessing: Preprocessing) -> np.ndarray | Tensor:
    """The pixels that evaluation sees of a picture, (height, width, 3) uint8; a tensor is used as it is.

    Args:
        preprocessing: its `img_size`, `crop_ratio` and `interpolation`; mean and std apply later, to the batch.
    """
    if isinstance(picture, Tensor):
        return picture
    return np.asarray(resize_and_crop(as_image(picture), preprocessing))


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The image, resized so that its centre crop of `img_size` covers `crop_ratio` of it along the tighter side.

    Returns:
        A Pillow image of exactly `img_size`, whatever the proportions of the input.
    """
    height, width = preprocessing.img_size
    # 224 / 0.875 = 256: the classic "resize to 256, crop 224".
    covered = (int(height / preprocessing.crop_ratio), int(width / preprocessing.crop_ratio))
    if covered[0] * image.width >= covered[1] * image.height:  # the height is the tighter side
        size = (covered[0] * image.width // image.height, covered[0])
    else:
        size = (covered[1], covered[1] * image.height // image.width)
    resized = image.resize(size, FILTERS[preprocessing.interpolation])
    # As torchvision's CenterCrop rounds.
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return resized.crop((left, top, left + width, top + height))
