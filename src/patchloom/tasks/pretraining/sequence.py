"""BeiT as two runs: a tokenizer on the same images, then the network that predicts its codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from patchloom.recipes.beit import tokenizer_recipe
from patchloom.recipes.pretraining import PretrainingOptions
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.pretraining.tokenizers import find_tokenizer
from patchloom.tasks.spec import RunConfig


@dataclass(frozen=True)
class BeitAfterTokenizer:
    """The second run: the data and the network of the first, with a recipe of its own."""

    folder: ClassVar[str] = "tokenizer"

    recipe: Recipe

    def check(self, first: RunConfig) -> RunConfig:
        """The second run without its tokenizer; the plan has checked it."""
        return RunConfig(first.spec, first.task, self.recipe, opened=first.opened)

    def second(self, first: RunConfig, weights: Path) -> RunConfig:
        """The second run, with the tokenizer that the first has exported."""
        task = dataclasses.replace(first.task, tokenizer=find_tokenizer(str(weights.absolute())))
        return RunConfig(first.spec, task, self.recipe)

    def describe(self) -> str:
        return "BeiT, which predicts the codes of the tokenizer"

    def to_json(self) -> dict[str, Any]:
        return {"recipe": self.recipe.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BeitAfterTokenizer:
        return cls(Recipe.of(PretrainingOptions, **values["recipe"]))


def with_tokenizer_first(beit: RunConfig) -> RunConfig:
    """The run that trains a tokenizer, followed by the BeiT run."""
    recipe = tokenizer_recipe(beit.recipe)
    return dataclasses.replace(beit, recipe=recipe, then=BeitAfterTokenizer(beit.recipe))
