"""Recipes of translation: the papers' values, each with a source, and their learning rates."""

from __future__ import annotations

import pytest

from patchloom import PatchloomError
from patchloom.recipes.changes import apply_changes
from patchloom.recipes.registry import find_recipe
from patchloom.recipes.translation import for_target
from patchloom.training.schedule import learning_rate

NAMES = ("resmlp_mt", "transformer_mt", "resmlp_mt@small", "transformer_mt@small")


def test_the_papers_values_are_kept() -> None:
    ours = find_recipe("resmlp_mt")
    assert (ours.optimizer, ours.lr, ours.warmup_steps) == ("adagrad", 0.2, 32_000)
    assert (ours.label_smoothing, ours.dropout, ours.layerscale, ours.beam) == (0.1, 0.15, 0.2, 4)
    assert for_target(ours, "fr").dropout == 0.1
    assert for_target(ours, "de").dropout == 0.15
    assert for_target(ours.replace(dropout=0.3), "fr").dropout == 0.3  # the user's own value
    assert find_recipe("transformer_mt").optimizer == "adam"


@pytest.mark.parametrize("name", NAMES)
def test_values_that_differ_from_the_defaults_have_a_source(name: str) -> None:
    recipe = find_recipe(name)
    default = type(recipe).of(type(recipe.options), name="default").to_json()
    others = {key for key, value in recipe.to_json().items() if value != default[key]}
    assert others - {"name", "summary", "sources"} <= set(recipe.sources)


@pytest.mark.parametrize("step", [1, 500, 3999, 4000, 20_000, 99_999])
def test_the_transformers_rate_is_its_formula(step: int) -> None:
    formula = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)  # Vaswani et al., equation 3
    assert learning_rate(find_recipe("transformer_mt"), step, 1000) == pytest.approx(formula, rel=4e-3, abs=2e-7)


def test_adagrad_keeps_its_rate_after_the_warm_up() -> None:
    recipe = find_recipe("resmlp_mt")
    assert learning_rate(recipe, 16_000, 1000) == pytest.approx(0.1)
    assert learning_rate(recipe, 32_000, 1000) == learning_rate(recipe, 90_000, 1000) == 0.2


def test_epochs_take_the_place_of_steps() -> None:
    changed, notes = apply_changes(find_recipe("resmlp_mt"), {"epochs": 3})
    assert changed.steps is None
    assert changed.duration == "3 epochs"
    assert "steps none" in notes[0]


def test_values_that_cannot_work_are_refused() -> None:
    for changes, message in (
        ({"length_penalty": 1000.0}, "length_penalty of resmlp_mt is at most 10, not 1000"),
        ({"beam": 1001}, "beam"),
        ({"vocabulary": 4}, "from 5 to"),
    ):
        with pytest.raises(PatchloomError, match=message):
            apply_changes(find_recipe("resmlp_mt"), changes)
