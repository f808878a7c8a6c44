"""ResMLP: Touvron et al., ResMLP: Feedforward networks for image classification (thesis chapter 4).

It reaches 76.6 % with S12 and 79.4 % with S24; "old-fashioned" training reaches 69.2 % with S12 (quoted from thesis
Tables 4.1 and 4.3).
"""

from __future__ import annotations

from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, cite, derive, for_patches, lamb, nearest_depth
from patchloom.recipes.deit import DEIT
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe

_SETTINGS = "caption of thesis Table 4.3 and author's answer in issue 106 of the published code"
_REFERENCE_DEPTH = 12
_RATES: dict[int, Cited] = {
    12: (0.05, "author's answers in issues 106 and 117 of the published code: 0.05 for 12 layers"),
    24: (0.1, "author's answer in issue 117 of the published code: 0.1 for 24 layers, stated for fine-tuning"),
}
_UNPRINTED = "ResNet practice (He et al., Goyal et al.): thesis Table 4.3 names the procedure, not its values; inferred"


def resmlp(model: PatchConfig | None = None) -> Recipe:
    """ResMLP's supervised procedure, with the drop rate of the model's depth; S12's without one."""
    depth = model.depth if model else _REFERENCE_DEPTH
    (rate, source), remark = nearest_depth(_RATES, depth)
    return cite(_RESMLP, drop_path=for_patches(model, (rate, source + remark)))


_RESMLP = derive(
    DEIT,
    "as DeiT (thesis 4.3)",
    "resmlp",
    "ResMLP on ImageNet-1k; drop rate by model",
    **lamb(_SETTINGS),
    epochs=(400, "caption of thesis Table 4.1"),
    batch_size=(2048, "author's answer in issue 106 of the published code"),
    lr=(5e-3, f"{_SETTINGS}; not scaled"),
    weight_decay=(0.2, _SETTINGS),
    drop_path_decay=("uniform", "published code: the same rate in every block"),
    layerscale=(
        None,
        "published code: 0.1 for S12, 1e-5 for S24, 1e-6 for S36 and B24 (by CaiT's rule B24 would have 1e-5); "
        "the model holds it",
    ),
    test_crop_ratio=(0.9, "README of the published code; the training crop is unchanged"),
    precision=("float32", "author's answer in issue 106 of the published code: no autocast"),
)


def resmlp_21k(model: PatchConfig | None = None) -> Recipe:
    """Pre-training on ImageNet-21k (ResMLP-B24/8)."""
    base = resmlp(model)
    return derive(
        base,
        "inferred, as resmlp",
        "resmlp_21k",
        "ResMLP-B24/8 on ImageNet-21k; drop rate by model",
        epochs=(60, "thesis Table 4.3: B24/8 on ImageNet-21k for 60 epochs; nothing else is printed"),
    )


# How ResNets were trained: SGD, steps, crops and flips only.
OLD_FASHIONED = cite(
    Recipe.of(ClassificationOptions, name="old_fashioned", summary="any network the way ResNets were trained"),
    epochs=(90, "thesis Table 4.3"),
    batch_size=(256, _UNPRINTED),
    resolution=(224, "thesis Table 4.3"),
    seed=(0, "inferred"),
    optimizer=("sgd", "thesis Table 4.3"),
    lr=(0.1, f"0.1 x batch / 256, {_UNPRINTED}"),
    lr_scaling=("linear", f"0.1 x batch / 256, {_UNPRINTED}"),
    momentum=(0.9, _UNPRINTED),
    nesterov=(False, _UNPRINTED),
    weight_decay=(1e-4, _UNPRINTED),
    clip_grad=(0.0, _UNPRINTED),
    schedule=("step", "thesis Table 4.3: waterfall decay"),
    schedule_by=("epoch", "inferred: steps fall between epochs"),
    decay_epochs=((30, 60, 80), f"by 10 at 30, 60 and 80 (others: every 30), {_UNPRINTED}"),
    warmup_epochs=(0.0, "inferred: none named, and none needed at batch 256"),
    min_lr=(0.0, "inferred: steps need no floor"),
    loss=("ce", _UNPRINTED),
    label_smoothing=(0.0, _UNPRINTED),
    crop=("rrc", "thesis Table 4.3: ResNet augmentation"),
    crop_scale=(0.08, _UNPRINTED),
    flip=(0.5, "thesis Table 4.3: ResNet augmentation"),
    augmentation=("none", "thesis Table 4.3: ResNet augmentation"),
    color_jitter=(0.0, _UNPRINTED),
    erasing=(0.0, "thesis Table 4.3: ResNet augmentation"),
    mixup=(0.0, "thesis Table 4.3: ResNet augmentation"),
    cutmix=(0.0, "thesis Table 4.3: ResNet augmentation"),
    repeated_augmentation=(1, "thesis Table 4.3: ResNet augmentation"),
    interpolation=("bicubic", "inferred: as the other recipes"),
    drop_path=(0.0, _UNPRINTED),
    ema=(0.0, _UNPRINTED),
    test_crop_ratio=(0.875, _UNPRINTED),
)
