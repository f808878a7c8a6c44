"""`key=value` words become changes of a recipe."""

from __future__ import annotations

import pytest

from patchloom.errors import PatchloomError
from patchloom.recipes.changes import apply_changes, parse_words
from patchloom.recipes.options import ClassificationOptions, Options
from patchloom.recipes.registry import find_recipe


def test_none_is_no_value_where_it_is_not_a_choice() -> None:
    words = ["layerscale=none", "drop_path=none", "scale=none", "steps=none"]
    changes = {"layerscale": None, "drop_path": None, "scale": "none", "steps": None}
    assert parse_words(words, ClassificationOptions) == (changes, {})


def test_words_reach_the_recipe_the_tasks_options_and_the_model() -> None:
    words = ["epochs=3", "mixup=0.2", "img_size=16", "layer_decay=0.75", "model.depth=2", "epochs=4"]
    changes = {"epochs": 4, "mixup": 0.2, "resolution": 16, "layer_decay": 0.75}
    assert parse_words(words, ClassificationOptions) == (changes, {"depth": 2})


@pytest.mark.parametrize(
    ("word", "options", "near"),
    [
        ("mixpu=0.2", ClassificationOptions, "'mixup'"),
        ("epoch=2", ClassificationOptions, "'epochs'"),
        ("mixup=0.2", Options, "no setting 'mixup'"),  # of another task
        ("img_size=16", Options, "no setting 'img_size'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(word: str, options: type[Options], near: str) -> None:
    with pytest.raises(PatchloomError, match=near):
        parse_words([word], options)


def test_a_warm_up_in_steps_keeps_its_share_of_a_shorter_run() -> None:
    """resmlp_mt warms up over 32,000 of 100,000 steps: all of a run of 2,000, without this rule."""
    recipe = find_recipe("resmlp_mt")
    changed, notes = apply_changes(recipe, {"steps": 2000})
    assert changed.warmup_steps == 640
    assert any(note.startswith("warmup_steps 640") for note in notes)
    assert apply_changes(recipe, {"steps": 2000, "warmup_steps": 100})[0].warmup_steps == 100
    assert apply_changes(recipe, {"steps": 50_000})[0].warmup_steps == 32_000


def test_epochs_and_steps_together_are_refused() -> None:
    recipe = find_recipe("deit")
    with pytest.raises(PatchloomError, match=r"epochs=3 and steps=10 both set the length"):
        apply_changes(recipe, {"epochs": 3, "steps": 10})
    assert apply_changes(recipe, {"epochs": 3, "steps": None})[0].epochs == 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deit@small", {"steps": 0}, "'steps' of .* must be a whole number from 1 to 1000000000000 or None, not 0"),
        ("deit@small", {"steps": -5}, "not -5"),
        ("resmlp_mt", {"warmup_steps": -1}, "must be a whole number of at least 0 or None, not -1"),
        ("deit@small", {"resolution": 0}, "whole number of at least 1 or None, not 0"),
    ],
)
def test_whole_numbers_that_may_be_none_have_bounds_too(name: str, changes: dict, message: str) -> None:
    with pytest.raises(PatchloomError, match=message):
        apply_changes(find_recipe(name), changes)
