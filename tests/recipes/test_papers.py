"""Every recipe holds the numbers that the papers print, for every model that they name, and says where."""

from __future__ import annotations

import json

import pytest

from patchloom.errors import PatchloomError
from patchloom.models.registry import entries, find_config
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe, setting_types
from patchloom.recipes.registry import find_recipe, finetuning_recipe, list_recipes

IMAGES = list_recipes(ClassificationOptions)
PAPERS = [name for name in IMAGES if "@" not in name]

# As printed: thesis Tables 3.9, 3.16, 5.8, 6.1, sections 3.7, 4.3.1, 5.2.3, 6.3, and the published commands.
_DEIT = {
    "optimizer": "adamw", "lr": 1e-3, "batch_size": 1024, "epochs": 300, "warmup_epochs": 5, "weight_decay": 0.05,
    "label_smoothing": 0.1, "loss": "ce", "mixup": 0.8, "cutmix": 1.0, "augmentation": "rand", "magnitude": 9,
    "crop": "rrc", "erasing": 0.25, "drop_path": 0.1, "repeated_augmentation": 3, "ema": 0, "resolution": 224,
    "drop_path_decay": "linear", "lr_scaling": "linear", "clip_grad": 0,
    "test_crop_ratio": 0.875, "warmup_lr": 1e-6, "min_lr": 1e-5, "eps": 1e-8,
    "schedule": "cosine", "mix_probability": 1, "switch_probability": 0.5, "color_jitter": 0,
}  # fmt: skip
_PATCHCONVNET = {
    "optimizer": "lamb", "lr": 3e-3, "batch_size": 2048, "epochs": 400, "warmup_epochs": 5, "weight_decay": 0.01,
    "label_smoothing": 0.1, "loss": "ce", "mixup": 0.8, "cutmix": 1.0, "augmentation": "rand", "magnitude": 9,
    "crop": "rrc", "erasing": 0, "drop_path": 0.15, "repeated_augmentation": 3, "ema": 0, "lr_scaling": "none",
    "clip_grad": 1, "test_crop_ratio": 1.0, "resolution": 224, "drop_path_decay": "uniform",
}  # fmt: skip
_A2 = {
    "optimizer": "lamb", "lr": 5e-3, "batch_size": 2048, "epochs": 300, "warmup_epochs": 5, "weight_decay": 0.02,
    "label_smoothing": 0, "loss": "bce", "mixup": 0.1, "cutmix": 1.0, "augmentation": "rand", "magnitude": 7,
    "crop": "rrc", "erasing": 0, "drop_path": 0.05, "repeated_augmentation": 3, "ema": 0, "lr_scaling": "none",
    "clip_grad": 1, "test_crop_ratio": 0.95, "resolution": 224, "color_jitter": 0, "layerscale": None,
}  # fmt: skip
_DEIT3 = {
    "optimizer": "lamb", "lr": 3e-3, "batch_size": 2048, "epochs": 400, "warmup_epochs": 5, "weight_decay": 0.02,
    "label_smoothing": 0, "loss": "bce", "bce_threshold": 0, "mixup": 0.8, "cutmix": 1.0, "augmentation": "three",
    "crop": "rrc", "color_jitter": 0.3, "erasing": 0, "drop_path": 0.1, "repeated_augmentation": 3, "clip_grad": 1,
    "lr_scaling": "none", "layerscale": 1e-4, "test_crop_ratio": 1.0, "resolution": 224, "scale": "layerscale",
    "drop_path_decay": "uniform", "ema": 0,
}  # fmt: skip
_DEIT3_21K = {
    **_DEIT3, "epochs": 90, "label_smoothing": 0.1, "loss": "ce", "mixup": 0, "crop": "src", "repeated_augmentation": 1,
}  # fmt: skip
_SGD = {
    **_DEIT, "optimizer": "sgd", "lr": 0.01, "batch_size": 768, "epochs": 1000, "weight_decay": 1e-4, "erasing": 0,
    "drop_path": 0, "ema": 0, "lr_scaling": "none", "nesterov": True,
}  # fmt: skip
_GRAFIT = {
    "optimizer": "sgd", "nesterov": True, "lr": 0.01, "batch_size": 512, "epochs": 240, "schedule": "cosine",
    "label_smoothing": 0, "mixup": 0, "cutmix": 0, "repeated_augmentation": 1, "augmentation": "rand", "erasing": 0.25,
    "resolution": 224, "ema": 0,
}  # fmt: skip
_CAIT = {
    **_DEIT, "epochs": 400, "lr_scaling": "none", "test_crop_ratio": 1.0, "drop_path_decay": "uniform",
    "scale": "layerscale", "layerscale": 1e-5,
}  # fmt: skip
_RESMLP = {
    **_DEIT, "optimizer": "lamb", "lr": 5e-3, "batch_size": 2048, "epochs": 400, "weight_decay": 0.2,
    "drop_path": 0.05, "lr_scaling": "none", "clip_grad": 1, "test_crop_ratio": 0.9, "precision": "float32",
    "drop_path_decay": "uniform",
}  # fmt: skip
_INAT = {**_DEIT, "lr": 7.5e-5, "batch_size": 768, "epochs": 360, "erasing": 0.1, "ema": 0}
PRINTED = {
    "deit": _DEIT,
    "cait": _CAIT,
    "depth_study": {**_DEIT, "drop_path": 0.05, "drop_path_decay": "uniform", "scale": None},
    "resmlp": _RESMLP,
    "resmlp_21k": {**_RESMLP, "epochs": 60},
    "patchconvnet": _PATCHCONVNET,
    "patchconvnet_21k": {**_PATCHCONVNET, "epochs": 90, "repeated_augmentation": 1},
    "patchconvnet_21k_to_1k": {
        **_PATCHCONVNET, "lr": 5e-4, "batch_size": 1024, "epochs": 100, "repeated_augmentation": 1, "drop_path": 0.05,
    },
    "patchconvnet_finetune": {
        **_PATCHCONVNET, "lr": 1e-5, "batch_size": 1024, "epochs": 10, "repeated_augmentation": 1, "drop_path": 0.05,
        "resolution": 384, "schedule": "constant", "warmup_epochs": 0,
    },
    "patchconvnet_per_class": {
        **_PATCHCONVNET, "lr": 5e-4, "batch_size": 1024, "epochs": 100, "repeated_augmentation": 1, "drop_path": 0.05,
    },
    "vit_a2": {**_A2, "lr": 4e-3, "scale": "none", "drop_path_decay": "uniform"},
    "vit_a2_ls": {**_A2, "lr": 4e-3, "epochs": 400, "scale": "layerscale", "layerscale": 1e-4},
    "deit3_1k": _DEIT3,
    "deit3_21k": _DEIT3_21K,
    "deit3_21k_to_1k": {**_DEIT3_21K, "lr": 3e-4, "epochs": 50, "drop_path": 0.15},
    "deit3_finetune": {
        **_DEIT, "lr": 1e-5, "batch_size": 512, "epochs": 20, "weight_decay": 0.1, "erasing": 0, "drop_path": 0.15,
        "repeated_augmentation": 1, "lr_scaling": "none", "test_crop_ratio": 1.0, "resolution": 384, "layerscale": 1e-4,
        "drop_path_decay": "uniform",
    },
    "resnet_a2": _A2,
    "old_fashioned": {
        "optimizer": "sgd", "lr": 0.1, "batch_size": 256, "lr_scaling": "linear", "momentum": 0.9, "epochs": 90,
        "weight_decay": 1e-4, "schedule": "step", "decay_epochs": (30, 60, 80), "label_smoothing": 0, "loss": "ce",
        "mixup": 0, "cutmix": 0, "augmentation": "none", "crop": "rrc", "flip": 0.5, "erasing": 0, "drop_path": 0,
        "repeated_augmentation": 1, "clip_grad": 0, "ema": 0,
    },
    "vit_original": {
        "optimizer": "adamw", "lr": 3e-3, "batch_size": 4096, "epochs": 300, "weight_decay": 0.3, "warmup_epochs": 3.4,
        "label_smoothing": 0, "augmentation": "none", "erasing": 0, "mixup": 0, "cutmix": 0, "dropout": 0.1,
        "repeated_augmentation": 1, "drop_path": 0, "clip_grad": 1,
    },
    "vit_augreg": {
        "optimizer": "adamw", "lr": 3e-3, "batch_size": 4096, "weight_decay": 0.3, "label_smoothing": 0.1, "cutmix": 0,
        "erasing": 0, "repeated_augmentation": 1, "clip_grad": 1, "dropout": 0.1,
    },
    "deit_cifar10": {**_DEIT, "epochs": 7200},
    "deit_finetune": {
        **_DEIT, "lr": 5e-6, "min_lr": 5e-6, "batch_size": 512, "epochs": 30, "weight_decay": 1e-8, "drop_path": 0,
        "resolution": 384, "ema": 0,
    },
    "cait_finetune": {
        **_CAIT, "lr": 5e-6, "min_lr": 5e-6, "batch_size": 256, "epochs": 60, "drop_path": 0, "resolution": 384,
    },
    "resmlp_finetune": {
        **_DEIT, "lr": 5e-6, "min_lr": 5e-6, "batch_size": 512, "epochs": 30, "weight_decay": 1e-8, "drop_path": 0.05,
        "resolution": 384, "ema": 0, "test_crop_ratio": 0.9, "drop_path_decay": "uniform",
    },
    "new_classes": {"optimizer": "adamw", "head_lr": 5e-3, "resolution": None},
    "transfer_cifar": _SGD,
    "transfer_flowers": _SGD,
    "transfer_cars": _SGD,
    "transfer_food": _GRAFIT,
    "transfer_inat18": _INAT,
    "transfer_inat19": _INAT,
    "grafit_transfer": _GRAFIT,
    "grafit_transfer_cutmix": {**_GRAFIT, "cutmix": 1.0, "epochs": 300, "resolution": 384},
    "beit_finetune": {
        **_DEIT, "lr": 4e-3, "lr_scaling": "none", "epochs": 100, "warmup_epochs": 20, "repeated_augmentation": 1,
        "layer_decay": 0.65, "drop_path": 0.1, "min_lr": 1e-6, "schedule_by": "step", "ema": 0,
    },
    "mae_finetune": {
        **_DEIT, "lr": 2e-3, "epochs": 100, "layer_decay": 0.65, "warmup_lr": 0, "min_lr": 1e-6,
        "repeated_augmentation": 1,
    },
}  # fmt: skip

DROP_PATHS = {
    "cait": {
        "cait_xxs24": 0.05, "cait_xxs36": 0.1, "cait_xs24": 0.05, "cait_xs36": 0.1, "cait_s24": 0.1, "cait_s36": 0.2,
        "cait_s48": 0.3, "cait_m24": 0.2, "cait_m36": 0.3, "cait_m48": 0.4,
    },
    "resmlp": {"resmlp_s12": 0.05, "resmlp_s24": 0.1, "resmlp_b24": 0.1},
    "patchconvnet": {
        "patchconvnet_s20": 0.0, "patchconvnet_s36": 0.05, "patchconvnet_s60": 0.15, "patchconvnet_s120": 0.2,
        "patchconvnet_b36": 0.2, "patchconvnet_b60": 0.3, "patchconvnet_b120": 0.4,
    },
    "patchconvnet_21k": {"patchconvnet_s60": 0.15, "patchconvnet_b120": 0.4},
    "patchconvnet_21k_to_1k": {"patchconvnet_s20": 0.0, "patchconvnet_s36": 0.0, "patchconvnet_b120": 0.3},
    "patchconvnet_finetune": {"patchconvnet_s36": 0.0, "patchconvnet_s60": 0.05, "patchconvnet_b60": 0.2},
    "vit_a2": {"vit_tiny_12x1": 0.0, "vit_small_12x1": 0.05, "vit_base_12x1": 0.1, "vit_large_24x1": 0.4},
    "vit_a2_ls": {"vit_tiny_12x1": 0.0, "vit_large_24x1": 0.4},
    "deit3_1k": {
        "deit3_tiny": 0.0, "deit3_small": 0.0, "deit3_base": 0.1, "deit3_large": 0.4, "deit3_huge": 0.5,
    },
    "deit3_21k": {"deit3_tiny": 0.0, "deit3_small": 0.0, "deit3_base": 0.1, "deit3_large": 0.3, "deit3_huge": 0.5},
    "deit3_21k_to_1k": {"deit3_small": 0.05, "deit3_base": 0.15, "deit3_large": 0.4, "deit3_huge": 0.45},
    "deit3_finetune": {"deit3_small": 0.0, "deit3_base": 0.15, "deit3_large": 0.4, "deit3_huge": 0.55},
    "cait_finetune": {"cait_s24": 0.0, "cait_s36": 0.1, "cait_m36": 0.2, "cait_m48": 0.3},
    "depth_study": {
        "vit_small_12x1": 0.05, "vit_small_18x1": 0.1, "vit_small_24x1": 0.2, "vit_small_36x1": 0.25,
        "vit_small_48x1": 0.3,
    },
    "deit": {"deit_tiny": 0.1, "deit_small": 0.1, "deit_base": 0.1},
}  # fmt: skip


def for_model(recipe: str, model: str) -> Recipe:
    return find_recipe(recipe, find_config(model))


def test_all_and_their_small_forms_are_listed() -> None:
    assert list(PRINTED) == PAPERS
    assert [*PRINTED, *(f"{name}@small" for name in PRINTED)] == IMAGES


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_holds_what_is_printed(name: str) -> None:
    values = find_recipe(name).to_json()
    assert {field: values[field] for field in PRINTED[name]} == PRINTED[name]
    assert values["name"] == name


def test_transfer_follows_the_family() -> None:
    cait = {name: for_model(f"transfer_{name}", "cait_s24") for name in ("cifar", "flowers", "cars", "inat18")}
    assert {name: recipe.lr for name, recipe in cait.items()} == {
        "cifar": 1e-5, "flowers": 1e-4, "cars": 1e-4, "inat18": 1e-4,
    }  # fmt: skip
    assert {recipe.optimizer for recipe in cait.values()} == {"adamw"}
    assert [cait[name].epochs for name in ("cifar", "inat18")] == [1000, 360]
    resmlp = for_model("transfer_cifar", "resmlp_s24")
    assert (resmlp.optimizer, resmlp.lr, resmlp.weight_decay, resmlp.drop_path) == ("adamw", 5e-6, 0.05, 0.1)
    assert for_model("transfer_flowers", "deit3_base").test_crop_ratio == 1.0
    assert for_model("transfer_flowers", "deit3_base").tune == "attention"
    assert for_model("transfer_cars", "deit3_base").tune == for_model("transfer_flowers", "deit_base").tune == "all"
    for name in ("cifar", "flowers", "cars", "inat18", "inat19"):
        assert for_model(f"transfer_{name}", "resmlp_s12").test_crop_ratio == 0.9
        assert for_model(f"transfer_{name}", "deit3_base").drop_path_decay == "uniform"


def test_the_default_recipe_of_fine_tuning() -> None:
    assert finetuning_recipe("cait", True, 1_000_000) == "cait_finetune"
    assert finetuning_recipe("cait", True, 2000) == "cait_finetune@small"
    assert finetuning_recipe("resmlp", False, 2000) == "new_classes"
    assert all(finetuning_recipe(entry.config.family, True, 10) in list_recipes() for entry in entries())


@pytest.mark.parametrize("name", DROP_PATHS)
def test_drop_path_is_the_papers_for_each_model(name: str) -> None:
    found = {model: for_model(name, model) for model in DROP_PATHS[name]}
    assert {model: recipe.drop_path for model, recipe in found.items()} == DROP_PATHS[name]
    assert not any("inferred for" in recipe.sources["drop_path"] for recipe in found.values())


def test_layerscale_of_cait_follows_depth() -> None:
    models = {"cait_nano": 0.1, "cait_xxs24": 1e-5, "cait_xxs36": 1e-6, "cait_m24": 1e-5, "cait_m48": 1e-6}
    assert {model: for_model("cait", model).layerscale for model in models} == models
    assert "1e-5" in for_model("cait", "cait_xxs36").sources["layerscale"].split("published code")[1]


def test_both_rows_of_cait_are_told() -> None:
    assert "ICCV Table 3: 0.2" in for_model("cait", "cait_xs36").sources["drop_path"]
    assert "thesis Table 3.16: 0.1" in for_model("cait", "cait_xs36").sources["drop_path"]


def test_rates_and_decays_by_width() -> None:
    models = {"vit_tiny_12x1": 4e-3, "vit_small_12x1": 4e-3, "vit_base_12x1": 3e-3, "vit_large_24x1": 3e-3}
    for name in ("vit_a2", "vit_a2_ls"):
        assert {model: for_model(name, model).lr for model in models} == models
    assert for_model("patchconvnet", "patchconvnet_s120").weight_decay == 0.01
    assert for_model("patchconvnet", "patchconvnet_b60").weight_decay == 0.05
    assert for_model("patchconvnet_21k", "patchconvnet_b60").weight_decay == 0.01


@pytest.mark.parametrize(
    ("name", "model", "rate"),
    [
        ("cait", "cait_nano", 0.0),  # the rule by depth
        ("cait", "deit_small", 0.0),
        ("cait", "cait_b12", 0.1),  # 0.1 more at width 768 (thesis 3.5.2)
        ("cait", "vit_tiny_18x1", 0.025),  # half below width 384
        ("cait", "resnet50_attention_pool", 0.0),  # no rate by width for convnets
        ("vit_a2", "resnet50_attention_pool", 0.0),
        ("patchconvnet", "resnet50_attention_pool", 0.0),
        ("deit3_finetune", "resnet50_attention_pool", 0.0),
        ("resmlp", "resmlp_nano", 0.05),
        ("resmlp", "resmlp_s36", 0.1),
        ("patchconvnet", "patchconvnet_nano", 0.0),  # nearest S20
        ("patchconvnet", "patchconvnet_l60", 0.3),  # nearest B60
        ("vit_a2", "vit_small_36x1", 0.2),  # deeper networks follow CaiT's rule,
        ("vit_a2", "vit_small_18x2", 0.2),  # side by side as in a row
        ("vit_a2", "vit_base_24x1", 0.2),
        ("deit3_1k", "deit3_medium", 0.0),  # nearest S
        ("deit3_1k", "deit3_huge_52", 0.5),
        ("deit3_21k_to_1k", "deit3_nano", 0.05),
    ],
)
def test_unlisted_models_fall_back_and_say_so(name: str, model: str, rate: float) -> None:
    recipe = for_model(name, model)
    assert recipe.drop_path == rate
    assert "inferred for" in recipe.sources["drop_path"]


def test_options_count_rather_than_names() -> None:
    deeper = find_config("cait_s24").replace(depth=36)
    assert find_recipe("cait", deeper).drop_path == 0.2
    assert find_recipe("cait", deeper).layerscale == 1e-6


def test_every_recipe_fits_every_model() -> None:
    for name in list_recipes():
        for entry in entries():
            recipe = find_recipe(name, entry.config)
            assert recipe.name == name
            assert (getattr(recipe, "drop_path", None) or 0) <= 0.55  # the highest rate that any paper prints


DECIDED = {
    "epochs", "batch_size", "resolution", "seed", "optimizer", "lr", "lr_scaling", "weight_decay", "clip_grad",
    "schedule", "warmup_epochs", "min_lr", "loss", "label_smoothing", "crop", "flip", "augmentation", "color_jitter",
    "erasing", "mixup", "cutmix", "repeated_augmentation", "interpolation", "drop_path", "ema", "test_crop_ratio",
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_sources_are_complete(name: str) -> None:
    recipe = find_recipe(name)
    plain = Recipe.of(ClassificationOptions, name=name)
    fields = set(setting_types(ClassificationOptions))
    changed = {field for field in fields if getattr(recipe, field) != getattr(plain, field)}
    printed = set(PRINTED[name.removesuffix("@small")])
    assert (changed | printed | DECIDED) - {"layerscale", "momentum", "bce_threshold"} <= set(recipe.sources) <= fields
    assert all(text.strip() for text in recipe.sources.values())
    assert recipe.layerscale is None or recipe.sources["layerscale"]
    assert recipe.optimizer != "sgd" or recipe.sources["momentum"]
    assert recipe.loss != "bce" or recipe.sources["bce_threshold"]
    assert recipe.summary


@pytest.mark.parametrize(
    ("name", "field", "told"),
    [
        ("deit3_1k", "lr", ("3e-3", "4e-3")),
        ("deit3_1k", "weight_decay", ("0.02", "0.05")),
        ("deit3_1k", "epochs", ("400", "800")),
        ("deit3_21k", "lr", ("3e-3", "1e-3")),
        ("deit3_21k", "epochs", ("90", "240")),
        ("deit3_finetune", "erasing", ("0.25", "README")),
        ("resnet_a2", "mixup", ("0.1", "0.2")),
        ("cait", "test_crop_ratio", ("1.0", "0.875")),
    ],
)
def test_where_sources_differ_both_are_told(name: str, field: str, told: tuple[str, str]) -> None:
    source = find_recipe(name).sources[field]
    assert all(word in source for word in (*told, "default here"))


def test_recipes_are_plain_json() -> None:
    for name in list_recipes():
        recipe = find_recipe(name)
        values = recipe.to_json()
        back = json.loads(json.dumps(values))
        assert Recipe.of(type(recipe.options), **back).to_json() == values


@pytest.mark.parametrize(
    ("name", "near"),
    [("diet", "'deit'"), ("cait@smal", "'cait@small'"), ("diet@small", "'deit@small'"), ("vit_a3", "'vit_a2'")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(PatchloomError, match=name) as refused:
        find_recipe(name)
    assert near in str(refused.value)


@pytest.mark.parametrize("name", ["@small", "", "deit@small@small", None])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(PatchloomError):
        find_recipe(name)  # type: ignore[arg-type]
