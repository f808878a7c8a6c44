"""What a translation run learns from what: parallel text, two languages, a model and a vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchloom.models.registry import config_from_json
from patchloom.models.translation import TranslationConfig
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.translation.text import Pair, parse_pair


@dataclass(frozen=True)
class TranslationRunConfig:
    """Data, pair and model. `vocabulary_file` is None for a vocabulary that is trained on the training split."""

    data: str
    pair: str  # "en-de"
    model: TranslationConfig  # its vocab_size is decided by the vocabulary
    model_options: dict[str, Any] = field(default_factory=dict)
    vocabulary_file: str | None = None

    @property
    def label(self) -> str:
        return "translate"

    @property
    def languages(self) -> Pair:
        return parse_pair(self.pair)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TranslationRunConfig:
        model: Any = config_from_json(values["model"])
        return cls(values["data"], values["pair"], model, dict(values["model_options"]), values["vocabulary_file"])

    def network_config(self, recipe: Recipe, vocab_size: int) -> TranslationConfig:
        """The model's config as the recipe trains it, then the user's options."""
        own: dict[str, Any] = {"vocab_size": vocab_size}
        if recipe.dropout is not None:
            own["dropout"] = recipe.dropout
        if recipe.layerscale is not None and self.model.scale_value is not None:
            own["scale_value"] = recipe.layerscale
        return self.model.replace(**{**own, **self.model_options})
