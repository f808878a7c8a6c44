"""What recipe.yaml holds of a run with parts of the user's own: their names, and the settings that apply to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from patchloom.data.parts import THREE_AUGMENT
from patchloom.recipes.options import Options


@dataclass(frozen=True)
class OwnConfig:
    """Names of the parts. The parts themselves are Python objects, which the script that started the run holds."""

    data: str
    model: dict[str, Any]  # at least its name
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return "own"

    def to_json(self) -> dict[str, Any]:
        return {"data": self.data, "model": self.model, "parts": self.parts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OwnConfig:
        return cls(values["data"], dict(values["model"]), dict(values.get("parts", {})))


@dataclass(frozen=True, kw_only=True)
class OwnOptions(Options):
    """For a module of the user's own: how images that are not tensors are cropped and augmented. See ImageOptions."""

    # For images that are not tensors; the module must take this size.
    resolution: int | None = 224
    crop: Literal["rrc", "src", "src_axis", "pad"] = "rrc"
    crop_scale: float = 0.08
    flip: float = 0.5
    augmentation: Literal["rand", "auto", "trivial", "three", "none"] = "rand"
    three_augment: tuple[str, ...] = THREE_AUGMENT
    magnitude: float = 9.0
    color_jitter: float = 0.0
    affine: float = 0.0
    repeated_augmentation: int = 1
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    pixels: Literal["exact", "fast"] = "exact"
    test_crop_ratio: float = 0.875

    FRACTIONS: ClassVar[tuple[str, ...]] = ("crop_scale", "flip", "color_jitter", "affine", "test_crop_ratio")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ("magnitude",)
