"""What recipe.yaml remembers of a run with parts of the user's own: their names, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OwnConfig:
    """Names of the parts. The parts themselves are Python objects, which the script that started the run holds."""

    data: str
    model: str
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return "own"

    def to_json(self) -> dict[str, Any]:
        return {"data": self.data, "model": {"name": self.model}, "parts": self.parts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OwnConfig:
        return cls(values["data"], values["model"]["name"], dict(values.get("parts", {})))
