"""How a photo becomes the input of a network: the values that travel with weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CROP_RATIO = {"cait": 1.0, "deit3": 1.0, "patchconvnet": 1.0, "resmlp": 0.9}  # at test time; DeiT and others 0.875


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side to size / crop_ratio, take the centre, scale to [0, 1], subtract mean, divide by std."""

    img_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_ratio: float = 0.875
    interpolation: str = "bicubic"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Preprocessing:
        known: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def default_preprocessing(family: str, img_size: tuple[int, int], in_chans: int) -> Preprocessing:
    """The papers' normalisation and test crop; grey and many-channel inputs get the average of the RGB values."""
    mean, std = (values if in_chans == 3 else (sum(values) / 3,) * in_chans for values in (IMAGENET_MEAN, IMAGENET_STD))
    return Preprocessing(img_size, mean, std, CROP_RATIO.get(family, 0.875))
