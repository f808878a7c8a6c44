"""DeiT: Touvron et al., Training data-efficient image transformers & distillation through attention (thesis chapter 3).

It reaches 72.2, 79.8 and 81.8 % with DeiT-Ti, S and B on ImageNet (quoted from thesis Table 3.5).
"""

from __future__ import annotations

from patchloom.recipes.cited import cite, derive
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe

_TABLE = "thesis Table 3.9"
_CODE = "published code"

DEIT = cite(
    Recipe.of(ClassificationOptions, name="deit", summary="DeiT on ImageNet-1k"),
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
        f"{_CODE}: no weight decay for vectors, positions (not in ResMLP and PatchConvNet) and the class token. "
        "The published code does decay the distillation token; patchloom does not",
    ),
    clip_grad=(0.0, _TABLE),
    schedule=("cosine", _TABLE),
    schedule_by=("epoch", f"{_CODE}: once an epoch"),
    schedule_published=(False, f"{_CODE}: True, epoch e at the rate of epoch e - 1; default here False"),
    warmup_epochs=(5.0, _TABLE),
    warmup_lr=(1e-6, _CODE),
    min_lr=(1e-5, _CODE),
    loss=("ce", f"{_CODE}: cross-entropy with soft targets"),
    label_smoothing=(
        0.1,
        f"{_TABLE}; the text spreads it over the other classes, {_CODE} over all of them; default here the code",
    ),
    crop=("rrc", _CODE),
    crop_scale=(0.08, _CODE),
    flip=(0.5, _CODE),
    augmentation=("rand", _TABLE),
    magnitude=(9.0, f"{_TABLE}: 9 / 0.5"),
    color_jitter=(
        0.0,
        f"thesis Table 6.1: none; {_CODE} declares 0.3, which has no effect beside RandAugment; default here 0",
    ),
    erasing=(0.25, _TABLE),
    mixup=(0.8, _TABLE),
    cutmix=(1.0, _TABLE),
    mix_probability=(1.0, _CODE),
    switch_probability=(0.5, _CODE),
    repeated_augmentation=(3, f"{_TABLE}; three repeats in the published code"),
    interpolation=("bicubic", _CODE),
    drop_path=(0.1, _TABLE),
    drop_path_decay=("linear", f"{_CODE}: rises linearly over the blocks; uniform 0.05 in expectation"),
    dropout=(None, f"{_TABLE}: none"),
    ema=(0.0, f'thesis Table 3.8: "+ EMA" is a row of its own; {_CODE} tracks 0.99996 and never evaluates it'),
    test_crop_ratio=(0.875, _CODE),
    precision=("float32", f"{_CODE}: fp16; default here float32, which every machine has"),
)

DEIT_CIFAR10 = derive(
    DEIT,
    "as DeiT (thesis 3.4.4)",
    "deit_cifar10",
    "DeiT on CIFAR-10 from scratch",
    epochs=(7200, "thesis 3.4.4: up to 7200"),
    resolution=(224, "thesis 3.4.4: images are resized to 224"),
    warmup_epochs=(5.0, "author's answer in issue 156 of the published code: not scaled with the epochs"),
)

_VIT = "thesis Tables 3.9 and 6.1, column ViT"

# How the first ViT was trained on ImageNet-1k, as the theses' tables print it for comparison.
VIT_ORIGINAL = derive(
    DEIT,
    "inferred, as DeiT",
    "vit_original",
    "ViT the way it was first trained, for comparison (Tables 3.9, 6.1)",
    epochs=(300, _VIT),
    batch_size=(4096, _VIT),
    lr=(3e-3, _VIT),
    lr_scaling=("none", "inferred: the rate is printed at its batch"),
    weight_decay=(0.3, "thesis Table 3.9: 0.3; Table 6.1 prints 0.1; default here 0.3"),
    clip_grad=(1.0, "thesis Table 6.1: 1.0; Table 3.9 names a clip without its value"),
    warmup_epochs=(3.4, _VIT),
    label_smoothing=(0.0, "thesis Table 3.9: none; Table 6.1 prints 0.1; default here none"),
    augmentation=("none", _VIT),
    magnitude=(9.0, "without effect: no RandAugment"),
    erasing=(0.0, _VIT),
    mixup=(0.0, _VIT),
    cutmix=(0.0, _VIT),
    repeated_augmentation=(1, f"{_VIT}: none"),
    drop_path=(0.0, f"{_VIT}: none"),
    dropout=(0.1, _VIT),
    ema=(0.0, f"inferred: {_VIT} names none"),
)

_STEINER = "thesis Table 6.1, column Steiner et al."
_ADAPTED = "adapted to model and data there; inferred: their light setting"

VIT_AUGREG = derive(
    VIT_ORIGINAL,
    "inferred, as vit_original",
    "vit_augreg",
    "ViT with the augmentation and regularisation of Steiner et al., for comparison (Table 6.1)",
    epochs=(300, "inferred, as vit_original: the table prints none"),
    batch_size=(4096, _STEINER),
    lr=(3e-3, _STEINER),
    weight_decay=(0.3, _STEINER),
    clip_grad=(1.0, _STEINER),
    warmup_epochs=(3.4, f"inferred, as vit_original: {_STEINER}"),
    label_smoothing=(0.1, _STEINER),
    augmentation=("rand", f"{_STEINER}: {_ADAPTED}"),
    magnitude=(10.0, f"{_STEINER}: {_ADAPTED}, magnitude 10"),
    mixup=(0.2, f"{_STEINER}: {_ADAPTED}, 0.2"),
    cutmix=(0.0, f"{_STEINER}: none"),
    erasing=(0.0, f"{_STEINER}: none"),
    repeated_augmentation=(1, f"{_STEINER}: none"),
    drop_path=(0.1, f"{_STEINER} names stochastic depth; inferred: 0.1"),
    dropout=(0.1, f"{_STEINER} names dropout; inferred: 0.1"),
)
