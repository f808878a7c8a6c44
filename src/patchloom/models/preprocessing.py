"""How a photo becomes the input of a network: the values that travel with weights."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.config import as_size
from patchloom.text import with_tuples

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LEAST_CROP = 0.05  # of the resized image; below it photos grow beyond any memory
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos")
CROP_RATIO = {"cait": 1.0, "deit3": 1.0, "patchconvnet": 1.0, "resmlp": 0.9}  # at test time; DeiT and others 0.875


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side to size / crop_ratio, take the centre, scale to [0, 1], subtract mean, divide by std."""

    img_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_ratio: float = 0.875
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        size = as_size(self.img_size)
        numbers = (self.mean, self.std, (self.crop_ratio,))
        sound = all(isinstance(row, tuple) and all(_is_number(value) for value in row) for row in numbers)
        if not sound or len(self.mean) != len(self.std) or min((*self.std, self.crop_ratio)) <= 0:
            raise PatchloomError(
                f"Preprocessing needs one mean and one positive std per channel and a positive crop_ratio, not "
                f"{self.mean}, {self.std} and {self.crop_ratio}."
            )
        if not LEAST_CROP <= self.crop_ratio <= 1:
            raise PatchloomError(f"A crop ratio is at least {LEAST_CROP} and at most 1, not {self.crop_ratio}.")
        if self.interpolation not in INTERPOLATIONS:
            raise PatchloomError(
                f"An image is resized by {', '.join(INTERPOLATIONS)} interpolation, not {self.interpolation!r}."
            )
        object.__setattr__(self, "img_size", size)

    @classmethod
    def from_json(cls, values: Any) -> Preprocessing:
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) - known:
            raise PatchloomError(f"Preprocessing is described by {', '.join(sorted(known))}, not by {values!r}.")
        return cls(**with_tuples(values))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def default_preprocessing(family: str, img_size: tuple[int, int], in_chans: int) -> Preprocessing:
    """The papers' normalisation and test crop; grey and many-channel inputs get the average of the RGB values."""
    mean, std = (values if in_chans == 3 else (sum(values) / 3,) * in_chans for values in (IMAGENET_MEAN, IMAGENET_STD))
    return Preprocessing(img_size, mean, std, CROP_RATIO.get(family, 0.875))
