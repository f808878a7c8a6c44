"""PatchConvNet: Touvron et al., Augmenting convolutional networks with attention-based aggregation (thesis chapter 5).

It reaches 82.1 % with S60 and 84.1 % with B120 on ImageNet-1k (quoted from thesis Table 5.1), 87.1 % with L120 at 384
pixels after ImageNet-21k (quoted from thesis Table 5.2).
"""

from __future__ import annotations

from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, Size, cite, derive, for_patches, lamb, nearest
from patchloom.recipes.deit import DEIT
from patchloom.recipes.recipe import Recipe

_SETTINGS = "thesis 5.2.3 and 5.3.4"
_CLIP: Cited = (
    1.0,
    f"{_SETTINGS}: no clipping; published code: LAMB clips the global norm at 1.0 by itself; default here LAMB's own",
)
_SMALL_WIDTH = 384  # of the S models, which decay less

# Width and depth: size and drop rate, thesis Table 5.8.
_RATES: dict[Size, tuple[str, float]] = {
    (384, 20): ("S20", 0.0),
    (384, 36): ("S36", 0.05),
    (384, 60): ("S60", 0.15),
    (384, 120): ("S120", 0.2),
    (768, 36): ("B36", 0.2),
    (768, 60): ("B60", 0.3),
    (768, 120): ("B120", 0.4),
}
_REFERENCE: Size = (384, 60)


def patchconvnet(model: PatchConfig | None = None) -> Recipe:
    """From scratch on ImageNet-1k; S60's values without a model."""
    decay = 0.01 if model is None or model.dim <= _SMALL_WIDTH else 0.05
    return cite(
        _PATCHCONVNET,
        drop_path=_drop_path(model),
        weight_decay=(decay, f"{_SETTINGS}: 0.01 for S, 0.05 for wider models"),
    )


def patchconvnet_21k(model: PatchConfig | None = None) -> Recipe:
    """Pre-training on ImageNet-21k."""
    rate, source = _drop_path(model)
    return cite(_PRETRAIN, drop_path=(rate, f"inferred, as from scratch: {source}"))


def patchconvnet_21k_to_1k(model: PatchConfig | None = None) -> Recipe:
    """From ImageNet-21k to ImageNet-1k."""
    return cite(_TO_1K, drop_path=_drop_path(model, less=0.1))


def patchconvnet_per_class(model: PatchConfig | None = None) -> Recipe:
    """From one query to one query per class, at the same resolution (finetune ... model.queries=per_class)."""
    rate, source = _drop_path(model, less=0.1)
    return cite(_PER_CLASS, drop_path=(rate, f"inferred, as the other fine-tunings: {source}"))


def rate_at_batch(recipe: Recipe, _: PatchConfig | None) -> dict[str, Cited]:
    """The second rate that the thesis prints for pre-training on ImageNet-21k."""
    return {"lr": (4e-3, "thesis 5.2.3: 4e-3 at batch 4096")} if recipe.batch_size == 4096 else {}


def patchconvnet_finetune(model: PatchConfig | None = None) -> Recipe:
    """Fine-tuning at a higher resolution."""
    return cite(_FINETUNE, drop_path=_drop_path(model, less=0.1))


def _drop_path(model: PatchConfig | None, less: float = 0.0) -> Cited:
    (size, rate), remark = nearest(_RATES, model) if model else (_RATES[_REFERENCE], "")
    lowered = f", less {less}, at least 0 ({_SETTINGS})" if less else ""
    source = f"thesis Table 5.8: {rate} for {size}{lowered}; the same in every block{remark}"
    return for_patches(model, (max(round(rate - less, 4), 0.0), source))


_PATCHCONVNET = derive(
    DEIT,
    "as DeiT (author's answer in issue 185 of the published code)",
    "patchconvnet",
    "PatchConvNet on ImageNet-1k; drop rate and weight decay by model",
    **{**lamb(_SETTINGS), "clip_grad": _CLIP},
    epochs=(400, _SETTINGS),
    batch_size=(2048, _SETTINGS),
    lr=(3e-3, f"{_SETTINGS}: for all models"),
    schedule=("cosine", f"{_SETTINGS}: half cosine"),
    warmup_epochs=(5.0, "inferred, as DeiT: thesis Table 3.9"),
    loss=("ce", _SETTINGS),
    label_smoothing=(0.1, f"inferred, as DeiT: {_SETTINGS} names label smoothing without a value"),
    augmentation=("rand", f"{_SETTINGS}: RandAugment, variant by Wightman et al."),
    magnitude=(
        9.0,
        "author's answer in issue 185 of the published code: DeiT's defaults, so 9; Wightman et al.'s own A2 has 7; "
        "default here 9",
    ),
    erasing=(0.0, f"{_SETTINGS}: no erasing"),
    mixup=(0.8, _SETTINGS),
    cutmix=(1.0, _SETTINGS),
    repeated_augmentation=(3, _SETTINGS),
    seed=(0, _SETTINGS),
    drop_path_decay=("uniform", "published code: the same rate in every block"),
    layerscale=(None, "published code: 1e-4 for S60, 1e-6 for S120 and wider models; the model holds it"),
    ema=(0.0, f"{_SETTINGS}: no average of weights"),
    test_crop_ratio=(1.0, "inferred: not stated"),
)

_PRETRAIN = derive(
    _PATCHCONVNET,
    "as patchconvnet",
    "patchconvnet_21k",
    "PatchConvNet on ImageNet-21k; drop rate by model",
    epochs=(90, _SETTINGS),
    batch_size=(2048, f"{_SETTINGS}: 2048 or 4096; default here 2048"),
    lr=(3e-3, f"{_SETTINGS}: 3e-3 at batch 2048, 4e-3 at batch 4096"),
    schedule=("cosine", f"{_SETTINGS}: half cosine"),
    weight_decay=(0.01, _SETTINGS),
    repeated_augmentation=(1, f"{_SETTINGS}: none"),
)

_TO_1K = derive(
    _PRETRAIN,
    "as patchconvnet_21k",
    "patchconvnet_21k_to_1k",
    "PatchConvNet from ImageNet-21k to 1k; drop rate by model",
    epochs=(100, _SETTINGS),
    batch_size=(1024, _SETTINGS),
    lr=(5e-4, _SETTINGS),
    schedule=("cosine", f"{_SETTINGS}: half cosine"),
    weight_decay=(0.01, "inferred, as patchconvnet_21k: not stated"),
    repeated_augmentation=(1, f"{_SETTINGS}: none"),
)

_FINETUNE = derive(
    _TO_1K,
    "as patchconvnet_21k_to_1k",
    "patchconvnet_finetune",
    "PatchConvNet at a higher resolution; drop rate by model",
    epochs=(10, _SETTINGS),
    batch_size=(1024, _SETTINGS),
    resolution=(
        384,
        "thesis Table 5.2: 288, 384 and 512; which one the settings are for is not said; default here 384",
    ),
    lr=(1e-5, f"{_SETTINGS}: fixed at 1e-5"),
    schedule=("constant", f"{_SETTINGS}: the rate is fixed"),
    warmup_epochs=(0.0, f"inferred: {_SETTINGS} fixes the rate"),
    weight_decay=(0.01, _SETTINGS),
    repeated_augmentation=(1, f"{_SETTINGS}: none"),
)

_PER_CLASS = derive(
    _TO_1K,
    "inferred, as patchconvnet_21k_to_1k",
    "patchconvnet_per_class",
    "PatchConvNet from one query to one per class; drop rate by model",
    batch_size=(1024, "thesis 5.2.1: a smaller batch, without a value; inferred, as patchconvnet_21k_to_1k"),
    lr=(5e-4, "thesis 5.2.1: a lower rate, without a value; inferred, as patchconvnet_21k_to_1k"),
)
