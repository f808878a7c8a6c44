"""DeiT: Touvron et al., Training data-efficient image transformers & distillation through attention (thesis chapter 3).

It reaches 72.2, 79.8 and 81.8 % with DeiT-Ti, S and B on ImageNet (quoted from thesis Table 3.5).
"""

from __future__ import annotations

from patchloom.recipes.cited import cite
from patchloom.recipes.recipe import Recipe

_TABLE = "thesis Table 3.9"
_CODE = "published code"

DEIT = cite(
    Recipe(name="deit", summary="DeiT on ImageNet-1k"),
    epochs=(300, _TABLE),
    batch_size=(1024, _TABLE),
    resolution=(224, "thesis 3.4.5"),
    seed=(0, f"{_CODE}: 0 plus the rank"),
    optimizer=("adamw", _TABLE),
    lr=(1e-3, f"{_TABLE}: 5e-4 x batch / 512"),
    lr_scaling=("linear", f"{_TABLE}: 5e-4 x batch / 512; warm-up and least rate are never scaled"),
    betas=((0.9, 0.999), _CODE),
    eps=(1e-8, _CODE),
    weight_decay=(0.05, _TABLE),
    no_decay=(
        ("norm", "scale", "position", "token"),
        f"{_CODE}: no vector, position or class token decays (ResMLP and PatchConvNet have no positions to name); "
        "it does decay the distillation token, which is left out here",
    ),
    clip_grad=(0.0, _TABLE),
    schedule=("cosine", _TABLE),
    schedule_by=("epoch", f"{_CODE}: once an epoch"),
    schedule_published=(False, f"{_CODE}: True, epoch e at the rate of epoch e - 1; default here False"),
    warmup_epochs=(5.0, _TABLE),
    warmup_lr=(1e-6, _CODE),
    min_lr=(1e-5, _CODE),
    loss=("ce", "thesis 3.4.5: cross-entropy with soft targets"),
    label_smoothing=(0.1, _TABLE),
    crop=("rrc", _CODE),
    crop_scale=(0.08, _CODE),
    flip=(0.5, _CODE),
    augmentation=("rand", _TABLE),
    magnitude=(9.0, f"{_TABLE}: 9 / 0.5"),
    color_jitter=(0.0, f"{_CODE}: 0.3 is declared but has no effect beside RandAugment; default here 0"),
    erasing=(0.25, _TABLE),
    mixup=(0.8, _TABLE),
    cutmix=(1.0, _TABLE),
    mix_probability=(1.0, _CODE),
    switch_probability=(0.5, _CODE),
    repeated_augmentation=(3, f"{_TABLE}; three repeats in the published code"),
    interpolation=("bicubic", _CODE),
    drop_path=(0.1, f"{_TABLE}; rises linearly to it over the blocks of a DeiT"),
    ema=(0.99996, f"{_CODE}: tracked and saved, never evaluated; not in {_TABLE}"),
    test_crop_ratio=(0.875, _CODE),
    precision=("float32", f"{_CODE}: fp16; default here float32, which every machine has"),
)
