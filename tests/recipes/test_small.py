"""NAME@small is one rule over any recipe, and each change says what was there before."""

from __future__ import annotations

import pytest

from patchloom.models.registry import find_config
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.recipes.registry import find_recipe, list_recipes
from patchloom.recipes.small import small

PAPERS = [name for name in list_recipes(ClassificationOptions) if "@" not in name]
RULED = {
    "batch_size", "epochs", "warmup_epochs", "schedule_by", "decay_epochs", "bce_threshold",
    "lr_scaling", "resolution", "crop_scale", "augmentation", "affine",
    "color_jitter", "erasing", "mixup", "cutmix", "drop_path", "repeated_augmentation", "ema", "test_crop_ratio",
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_the_rule_holds_for_every_recipe(name: str) -> None:
    paper, form = find_recipe(name), find_recipe(f"{name}@small")
    assert form == small(paper)
    assert form.name == f"{name}@small"
    assert form.batch_size <= 64
    assert form.epochs <= 60
    assert form.schedule_by == "step"
    assert form.warmup_epochs <= 5
    assert (form.lr, form.lr_scaling, form.label_smoothing) == (paper.lr, "none", paper.label_smoothing)
    assert (form.resolution, form.test_crop_ratio) == (None, 1.0)
    assert (form.erasing, form.cutmix, form.ema, form.repeated_augmentation) == (0, 0, 0, 1)
    assert form.crop == "src" or form.crop_scale == 0.85
    assert form.augmentation == "none"
    assert form.color_jitter == 0
    assert form.affine == (0.1 if paper.augmentation != "none" else 0)
    assert form.mixup == min(paper.mixup, 0.2)
    assert form.bce_threshold == (0.2 if paper.loss == "bce" else paper.bce_threshold)
    assert form.drop_path == paper.drop_path / 2
    assert all(epoch < form.epochs for epoch in form.decay_epochs)


@pytest.mark.parametrize("name", PAPERS)
def test_each_change_names_the_original_and_the_rest_is_kept(name: str) -> None:
    paper, form = find_recipe(name), find_recipe(f"{name}@small")
    for field in setting_types(ClassificationOptions):
        before, after = getattr(paper, field), getattr(form, field)
        if before == after:
            assert form.sources.get(field) == paper.sources.get(field)
        else:
            assert field in RULED
            assert form.sources[field].startswith("small rule: ")
            assert form.sources[field].endswith(f"was {before}")


def test_the_rule_only_makes_smaller() -> None:
    modest = Recipe.of(ClassificationOptions, name="mine", batch_size=16, epochs=3, warmup_epochs=1, crop_scale=0.9)
    form = small(modest)
    assert (form.batch_size, form.epochs, form.warmup_epochs, form.crop_scale) == (16, 3, 1, 0.9)
    assert form.drop_path is None


def test_the_small_form_is_of_the_models_values() -> None:
    assert find_recipe("cait@small", find_config("cait_s36")).drop_path == 0.1
    assert find_recipe("cait@small", find_config("cait_s36")).layerscale == 1e-6
