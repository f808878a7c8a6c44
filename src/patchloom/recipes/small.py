"""NAME@small: any recipe adapted to a few thousand small images on a CPU, by one rule."""

from __future__ import annotations

from patchloom.recipes.cited import Cited
from patchloom.recipes.options import ClassificationOptions, ImageOptions, NetworkOptions
from patchloom.recipes.recipe import Recipe

SUFFIX = "@small"

BATCH_SIZE = 64  # at most: a few thousand images still give many steps per epoch
EPOCHS = 60  # at most: minutes on a CPU
WARMUP_EPOCHS = 5.0  # at most: longer warm-ups belong to longer runs
CROP_SCALE = 0.85  # at least: a twelfth of the area of a small image shows nothing
MIXUP = 0.2  # at most: short runs do better with mild mixtures
BCE_THRESHOLD = 0.2  # the minor image of a mild mixture counts only from a fifth on
AFFINE = 0.1  # small transformations in place of policies made for photos
DROP_PATH_FACTOR = 0.5  # short runs need less regularisation
TEST_CROP_RATIO = 1.0  # small images have no border to cut off


def small(recipe: Recipe) -> Recipe:
    """The small form of a recipe. The learning rate stays: small networks tolerate the rates of large batches."""
    changes = {name: (value, why) for name, (value, why) in _rule(recipe).items() if value != getattr(recipe, name)}
    sources = {name: f"small rule: {why}; was {getattr(recipe, name)}" for name, (_, why) in changes.items()}
    return recipe.replace(
        name=recipe.name + SUFFIX,
        summary=f"{recipe.name} adapted to small images and a CPU",
        sources={**recipe.sources, **sources},
        **{name: value for name, (value, _) in changes.items()},
    )


def _rule(recipe: Recipe) -> dict[str, Cited]:
    """Every field that the rule decides: its value and why."""
    rule: dict[str, Cited] = {
        "batch_size": (min(recipe.batch_size, BATCH_SIZE), f"at most {BATCH_SIZE}"),
        "epochs": (min(recipe.epochs, EPOCHS), f"at most {EPOCHS}"),
        "warmup_epochs": (min(recipe.warmup_epochs, WARMUP_EPOCHS), f"at most {WARMUP_EPOCHS:g}"),
        "schedule_by": ("step", "the rate changes at every step, because a short run has few epochs"),
        "lr_scaling": ("none", "the rate is kept at every batch size"),
        "ema": (0.0, "none"),
    }
    if recipe.decay_epochs:
        shrunk = tuple(round(epoch * min(1, EPOCHS / recipe.epochs)) for epoch in recipe.decay_epochs)
        rule["decay_epochs"] = (shrunk, "at the same shares of the run")
    for kind, more in ((ImageOptions, _images), (NetworkOptions, _network), (ClassificationOptions, _classification)):
        if isinstance(recipe.options, kind):
            rule |= more(recipe)
    return rule


def _images(recipe: Recipe) -> dict[str, Cited]:
    rule: dict[str, Cited] = {
        "resolution": (None, "the model's own"),
        "erasing": (0.0, "none"),
        "repeated_augmentation": (1, "none"),
    }
    if recipe.crop == "rrc":
        rule["crop_scale"] = (max(recipe.crop_scale, CROP_SCALE), f"at least {CROP_SCALE}")
    if recipe.augmentation != "none":
        rule["augmentation"] = ("none", "small moves in place of a policy for photos")
        rule["affine"] = (AFFINE, "small moves in place of a policy for photos")
        rule["color_jitter"] = (0.0, "none")
    return rule


def _network(recipe: Recipe) -> dict[str, Cited]:
    if not recipe.drop_path:
        return {}
    return {"drop_path": (recipe.drop_path * DROP_PATH_FACTOR, f"times {DROP_PATH_FACTOR}")}


def _classification(recipe: Recipe) -> dict[str, Cited]:
    rule: dict[str, Cited] = {
        "mixup": (min(recipe.mixup, MIXUP), f"at most {MIXUP}"),
        "cutmix": (0.0, "none"),
        "test_crop_ratio": (TEST_CROP_RATIO, "the whole image"),
    }
    if recipe.loss == "bce" and recipe.bce_threshold is not None:
        rule["bce_threshold"] = (BCE_THRESHOLD, "what a mild mixture hardly shows does not count")
    return rule
