"""DeiT III: Touvron et al., DeiT III: Revenge of the ViT, ECCV 2022 (thesis chapter 6).

It reaches 83.1 % with ViT-B in 400 epochs on ImageNet-1k (quoted from thesis Table 6.15), 85.2 % in 90 epochs on
ImageNet-21k (quoted from thesis Table 6.9).
"""

from __future__ import annotations

import dataclasses

from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, Size, cite, derive, for_patches, lamb, nearest
from patchloom.recipes.deit import DEIT
from patchloom.recipes.recipe import Recipe

_TABLE = "thesis Table 6.1"
_README = "README of the published code"
_STAGE = f"thesis Table 6.1 and {_README}"
_FINE = f"{_README}; thesis 6.3.6 names the procedure"

_LONG_21K = 240  # epochs of the longer pre-training
_TI, _S, _B, _L, _H = (192, 12), (384, 12), (768, 12), (1024, 24), (1280, 32)

# Drop rates by width and depth, with other values that are printed for that size.
_RATES_1K: dict[Size, Cited] = {
    _TI: (0.0, "Ti"),
    _S: (0.0, "S; README, 800 epochs: 0.05"),
    _B: (0.1, "B; README, 800 epochs: 0.2"),
    _L: (0.4, "L; README, 800 epochs: 0.45"),
    _H: (0.5, "H; README, 800 epochs: 0.6"),
}
_RATES_21K: dict[Size, Cited] = {
    _TI: (0.0, "Ti"),
    _S: (0.0, "S; README, 240 epochs: 0.05"),
    _B: (0.1, "B; README, 240 epochs: 0.1"),
    _L: (0.3, "L; README, 240 epochs: 0.3"),
    _H: (0.5, "H; README, 90 epochs: 0.5"),
}
_RATES_TO_1K: dict[Size, Cited] = {_S: (0.05, "S"), _B: (0.15, "B"), _L: (0.4, "L"), _H: (0.45, "H")}
_RATES_FINE: dict[Size, Cited] = {
    _S: (0.0, "S at 384"),
    _B: (0.15, "B at 384; at 224: 0.2"),
    _L: (0.4, "L at 384; at 224: 0.45"),
    _H: (0.55, "H at 224; none is printed at 384"),
}
_RATES_FINE_224: dict[Size, Cited] = {
    _S: (0.0, "S at 384; none is printed at 224, where S is trained"),
    _B: (0.2, "B at 224"),
    _L: (0.45, "L at 224"),
    _H: (0.55, "H at 224"),
}


def deit3_1k(model: PatchConfig | None = None) -> Recipe:
    """From scratch on ImageNet-1k; ViT-B's values without a model."""
    return _for_model(_DEIT3_1K, model, _RATES_1K, "thesis Table 6.14, 400 epochs")


def deit3_21k(model: PatchConfig | None = None) -> Recipe:
    """Pre-training on ImageNet-21k."""
    return _for_model(_DEIT3_21K, model, _RATES_21K, "thesis Table 6.14, 90 epochs")


def deit3_21k_to_1k(model: PatchConfig | None = None) -> Recipe:
    """From ImageNet-21k to ImageNet-1k."""
    return _for_model(_DEIT3_TO_1K, model, _RATES_TO_1K, _README)


def deit3_finetune(model: PatchConfig | None = None) -> Recipe:
    """Fine-tuning at another resolution, in training mode: stochastic depth is active. ViT-H, whose patches of 14 do
    not divide 384, is fine-tuned at 224 (thesis Table 6.6), and so is what was trained below 224."""
    recipe = _for_model(_DEIT3_FINETUNE, model, _RATES_FINE, _FINE)
    if model is not None and (384 % model.patch_size or model.img_size[0] < 224):
        why = f"thesis Table 6.6: 224; patches of {model.patch_size} do not divide 384"
        if model.img_size[0] < 224:
            why = f"{_README}: 224 after training at 192 or 160 (here {model.img_size[0]}), else 384"
        recipe = cite(_for_model(_DEIT3_FINETUNE, model, _RATES_FINE_224, _FINE), resolution=(224, why))
    if model is None or model.family != "vit":
        return recipe
    inferred = {name: f"inferred for {model.name}: {text}" for name, text in recipe.sources.items()}
    return dataclasses.replace(recipe, sources=inferred)


def longer_1k(recipe: Recipe, model: PatchConfig | None) -> dict[str, Cited]:
    """Changes for more than 400 epochs (thesis 6.4): weight decay 0.05, and 0.05 more drop rate per 200 epochs."""
    extra = max(0, recipe.epochs - _DEIT3_1K.epochs)
    if not extra:
        return {}
    rule = f"thesis 6.4, for {recipe.epochs} epochs"
    raised = _raised(recipe, 0.05 * (extra // 200), f"{rule}: 0.05 more for every 200 epochs beyond 400")
    return {"weight_decay": (0.05, f"{rule}: 0.05"), "drop_path": for_patches(model, raised)}


def longer_21k(recipe: Recipe, model: PatchConfig | None) -> dict[str, Cited]:
    """Changes for 240 epochs (caption of thesis Table 6.5): 0.05 more drop rate."""
    if recipe.epochs < _LONG_21K:
        return {}
    raised = _raised(recipe, 0.05, f"caption of thesis Table 6.5: 0.05 more for {_LONG_21K} epochs")
    return {"drop_path": for_patches(model, raised)}


def finetune_at_224(recipe: Recipe, model: PatchConfig | None) -> dict[str, Cited]:
    """The drop rates of fine-tuning at 224 pixels, after training at 192 or 160."""
    if recipe.resolution is None or recipe.resolution > 224:
        return {}
    return {"drop_path": _rate(model, _RATES_FINE_224, _FINE)}


def _raised(recipe: Recipe, by: float, why: str) -> Cited:
    return round((recipe.drop_path or 0.0) + by, 4), f"{recipe.drop_path or 0:g}, raised by {by:g}; {why}"


def _for_model(recipe: Recipe, model: PatchConfig | None, rates: dict[Size, Cited], where: str) -> Recipe:
    return cite(recipe, drop_path=_rate(model, rates, where))


def _rate(model: PatchConfig | None, rates: dict[Size, Cited], where: str) -> Cited:
    (rate, size), remark = nearest(rates, model) if model else (rates[_B], "")
    return for_patches(model, (rate, f"{where}: {rate:g} for {size}; the same in every block{remark}"))


_DEIT3_1K = derive(
    DEIT,
    "as DeiT",
    "deit3_1k",
    "DeiT III on ImageNet-1k; drop rate by model",
    **lamb(_TABLE),
    epochs=(400, "thesis Table 6.15: 300 to 800; README 800; default here 400"),
    batch_size=(2048, _TABLE),
    resolution=(224, "thesis 6.3.1; 192 or 160 are advised for large models; README: S 224, B and L 192, H 160"),
    lr=(3e-3, f"{_TABLE}: 3e-3; README: 4e-3 for S, 3e-3 for the others; default here the thesis"),
    weight_decay=(
        0.02,
        f"{_TABLE}: 0.02; thesis 6.4: 0.05 for longer runs; README 0.05 for 800 epochs; default here 0.02",
    ),
    schedule=("cosine", _TABLE),
    warmup_epochs=(5.0, _TABLE),
    loss=("bce", _TABLE),
    label_smoothing=(0.0, f"{_TABLE}: none"),
    bce_threshold=(0.0, "published code: every class of a mixed target counts as 1"),
    crop=("rrc", _TABLE),
    flip=(0.5, _TABLE),
    augmentation=("three", _TABLE),
    magnitude=(9.0, "without effect: 3-Augment has no magnitude"),
    color_jitter=(0.3, _TABLE),
    erasing=(0.0, f"{_TABLE}: none"),
    mixup=(0.8, _TABLE),
    cutmix=(1.0, _TABLE),
    repeated_augmentation=(3, _TABLE),
    drop_path_decay=("uniform", "published code: the same rate in every block"),
    scale=("layerscale", _TABLE),
    layerscale=(1e-4, "thesis 6.2.1: 1e-4 for all models"),
    ema=(0.0, f"not in {_TABLE}; published code: tracked, never evaluated"),
    test_crop_ratio=(1.0, _TABLE),
)

_DEIT3_21K = derive(
    _DEIT3_1K,
    "as deit3_1k",
    "deit3_21k",
    "DeiT III on ImageNet-21k; drop rate by model",
    epochs=(90, "thesis Table 6.5: 90 (240); README: 240 for S, B and L, 90 for H; default here 90"),
    batch_size=(2048, _TABLE),
    resolution=(224, "thesis 6.3.1; README: 128 for H"),
    lr=(3e-3, f"{_TABLE}: 3e-3; README 1e-3 (1.5e-3 at batch 4096); default here the thesis"),
    weight_decay=(0.02, _TABLE),
    warmup_epochs=(5.0, _TABLE),
    loss=("ce", _TABLE),
    label_smoothing=(0.1, _TABLE),
    bce_threshold=(0.0, "without effect: cross-entropy"),
    crop=("src", f"{_TABLE}; random along both axes in the published code, one in the text; default here both"),
    crop_scale=(0.08, "without effect: the simple random crop keeps the scale"),
    augmentation=("three", _TABLE),
    color_jitter=(0.3, _TABLE),
    erasing=(0.0, f"{_TABLE}: none"),
    mixup=(0.0, f"{_TABLE}: none"),
    cutmix=(1.0, _TABLE),
    repeated_augmentation=(1, f"{_TABLE}: none"),
    layerscale=(1e-4, "thesis 6.2.1"),
    test_crop_ratio=(1.0, _TABLE),
)

_DEIT3_TO_1K = derive(
    _DEIT3_21K,
    "as deit3_21k",
    "deit3_21k_to_1k",
    "DeiT III from ImageNet-21k to 1k; drop rate by model",
    epochs=(50, _README),
    batch_size=(2048, _STAGE),
    resolution=(224, f"{_README}; thesis 6.3.1 runs the same stage at 384 too"),
    lr=(3e-4, _STAGE),
    weight_decay=(0.02, _STAGE),
    warmup_epochs=(5.0, _STAGE),
    loss=("ce", _STAGE),
    label_smoothing=(0.1, _STAGE),
    crop=("src", _STAGE),
    mixup=(0.0, _STAGE),
    cutmix=(1.0, _STAGE),
    erasing=(0.0, _STAGE),
    repeated_augmentation=(1, _STAGE),
)

_DEIT3_FINETUNE = derive(
    DEIT,
    "as DeiT",
    "deit3_finetune",
    "DeiT III at another resolution; drop rate by model",
    epochs=(20, _FINE),
    batch_size=(512, _FINE),
    resolution=(384, f"{_README}: 384, and 224 after training at 192 or 160; default here 384"),
    optimizer=("adamw", _FINE),
    lr=(1e-5, f"{_FINE}; flat after the warm-up, as it equals the least rate"),
    lr_scaling=("none", "published code: never scaled"),
    weight_decay=(0.1, _FINE),
    clip_grad=(0.0, _FINE),
    warmup_epochs=(5.0, _FINE),
    warmup_lr=(1e-6, _FINE),
    loss=("ce", _FINE),
    label_smoothing=(0.1, _FINE),
    crop=("rrc", _FINE),
    augmentation=("rand", _FINE),
    magnitude=(9.0, _FINE),
    color_jitter=(0.0, f"{_FINE}: none"),
    erasing=(0.0, f"{_README}: 0; thesis chapter 3 keeps 0.25; default here 0"),
    mixup=(0.8, _FINE),
    cutmix=(1.0, _FINE),
    repeated_augmentation=(1, f"{_FINE}: none"),
    drop_path_decay=("uniform", "published code: the same rate in every block"),
    scale=("layerscale", _TABLE),
    layerscale=(1e-4, "thesis 6.2.1"),
    test_crop_ratio=(1.0, _FINE),
)
