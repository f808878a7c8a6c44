"""What recipe.yaml holds of a run with parts of the user's own: their names, and the settings that apply to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from patchloom.recipes.options import CropOptions


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
class OwnOptions(CropOptions):
    """For a module of the user's own: how images that are not tensors are cropped and augmented. The module must take
    images of `resolution`."""

    test_crop_ratio: float = 0.875

    FRACTIONS: ClassVar[tuple[str, ...]] = (*CropOptions.FRACTIONS, "test_crop_ratio")
