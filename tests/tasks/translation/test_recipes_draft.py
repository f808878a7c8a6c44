"""The values of the recipes: those of the papers, each with a source."""

from __future__ import annotations

import pytest

from patchloom.tasks.translation.recipes_draft import DROPOUT_BY_TARGET, RECIPES, learning_rate


def test_the_papers_values_are_kept_and_every_value_has_a_source() -> None:
    ours = {key: value for key, (value, _) in RECIPES["resmlp_mt"].items()}
    assert (ours["optimizer"], ours["lr"], ours["warmup_steps"]) == ("adagrad", 0.2, 32_000)
    assert (ours["label_smoothing"], ours["dropout"], ours["layerscale"], ours["beam"]) == (0.1, 0.15, 0.2, 4)
    assert DROPOUT_BY_TARGET["fr"][0] == 0.1
    assert RECIPES["transformer_mt"]["optimizer"][0] == "adam"
    for recipe in RECIPES.values():
        assert all(source for _, source in recipe.values())


@pytest.mark.parametrize("step", [0, 1, 500, 3999, 4000, 20_000, 99_999])
def test_the_transformers_rate_is_its_formula(step: int) -> None:
    formula = 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)  # Vaswani et al., equation 3
    assert learning_rate(RECIPES["transformer_mt"], step) == pytest.approx(formula, rel=4e-3, abs=2e-7)


def test_adagrad_keeps_its_rate_after_the_warm_up() -> None:
    assert learning_rate(RECIPES["resmlp_mt"], 15_999) == pytest.approx(0.1)
    assert learning_rate(RECIPES["resmlp_mt"], 31_999) == learning_rate(RECIPES["resmlp_mt"], 90_000) == 0.2
