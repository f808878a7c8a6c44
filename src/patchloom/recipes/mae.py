"""MAE: He et al. 2021, Masked autoencoders are scalable vision learners (the comparison of thesis Table 6.9)."""

from __future__ import annotations

from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, cite, derive
from patchloom.recipes.deit import DEIT
from patchloom.recipes.pretraining import PretrainingOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.small import SUFFIX

_CODE = "He et al. 2021, published code"
_COMMAND = "He et al. 2021, published command"
_SMALL = "ours, for thousands of small images on a CPU: tried on CIFAR-10 and crops of pets"

_PUBLISHED: dict[str, Cited] = {
    "method": ("mae", "He et al. 2021; thesis Table 6.9"),
    "epochs": (800, f"{_COMMAND}; thesis Table 6.9: 400, 800 and 1600"),
    "batch_size": (4096, _COMMAND),
    "optimizer": ("adamw", _CODE),
    "lr": (2.4e-3, f"{_COMMAND}: 1.5e-4 per 256 images"),
    "lr_scaling": ("linear", f"{_COMMAND}: 1.5e-4 per 256 images"),
    "betas": ((0.9, 0.95), _CODE),
    "weight_decay": (0.05, _COMMAND),
    "clip_grad": (0.0, f"{_CODE}: none"),
    "schedule_by": ("step", f"{_CODE}: the rate changes at every step"),
    "warmup_epochs": (40.0, _COMMAND),
    "warmup_lr": (0.0, _CODE),
    "min_lr": (0.0, _CODE),
    "resolution": (224, _CODE),
    "crop_scale": (0.2, f"{_CODE}: random resized crops of 0.2 to 1"),
    "flip": (0.5, _CODE),
    "augmentation": ("none", f"{_CODE}: crops and flips alone"),
    "erasing": (0.0, f"{_CODE}: none"),
    "drop_path": (0.0, f"{_CODE}: none in pre-training"),
    "aggregation": (
        "average",
        "He et al. 2021, appendix A: as good without a class token. No loss is on that token, and the published "
        "fine-tuning averages the patches",
    ),
    "mask_ratio": (0.75, _COMMAND),
    "norm_pixels": (True, f"{_COMMAND}; the improved MAE of thesis Table 6.9"),
    "decoder_dim": (512, _CODE),
    "decoder_depth": (8, _CODE),
    "decoder_heads": (16, _CODE),
}

MAE = cite(
    Recipe.of(PretrainingOptions, name="mae", summary="masked autoencoder without labels, for vision transformers"),
    **_PUBLISHED,
)

MAE_SMALL = cite(
    MAE.replace(name=f"mae{SUFFIX}", summary="mae adapted to small images and a CPU"),
    epochs=(60, _SMALL),
    batch_size=(64, _SMALL),
    lr=(2e-3, _SMALL),
    lr_scaling=("none", f"{_SMALL}; the rate is kept at every batch size"),
    warmup_epochs=(3.0, _SMALL),
    resolution=(None, f"{_SMALL}; the model's own"),
    crop_scale=(0.5, f"{_SMALL}; half of a small image still shows something"),
    decoder_dim=(64, f"{_SMALL}; light beside a small encoder"),
    decoder_depth=(1, f"{_SMALL}; light beside a small encoder"),
    decoder_heads=(4, _SMALL),
    test_crop_ratio=(1.0, f"{_SMALL}; the whole image"),
)

_FINETUNE = "He et al. 2021, published command for fine-tuning"
# by width: rate per 256 images, epochs, layer decay, drop rate
_BY_WIDTH = {768: (5e-4, 100, 0.65, 0.1), 1024: (1e-3, 50, 0.75, 0.2), 1280: (1e-3, 50, 0.75, 0.3)}


def mae_finetune(model: PatchConfig | None = None) -> Recipe:
    """Supervised fine-tuning of an encoder that MAE has trained; the values of ViT-B, L and H by width."""
    width = 768 if model is None else model.dim
    listed = min(_BY_WIDTH, key=lambda known: abs(known - width))
    rate, epochs, decay, drop_path = _BY_WIDTH[listed]
    where = _FINETUNE if listed == width else f"{_FINETUNE}; inferred for {model.name}: the nearest width"  # type: ignore[union-attr]
    return derive(
        DEIT,
        "inferred, as DeiT",
        "mae_finetune",
        "an encoder pre-trained with MAE (or BeiT), fine-tuned with labels",
        epochs=(epochs, where),
        batch_size=(1024, _FINETUNE),
        optimizer=("adamw", _FINETUNE),
        lr=(4 * rate, f"{where}: {rate:g} per 256 images"),
        lr_scaling=("linear", f"{where}: {rate:g} per 256 images"),
        layer_decay=(decay, where),
        weight_decay=(0.05, _FINETUNE),
        schedule_by=("step", f"{_CODE}: the rate changes at every step"),
        warmup_epochs=(5.0, _CODE),
        warmup_lr=(0.0, _CODE),
        min_lr=(1e-6, _CODE),
        drop_path=(drop_path, where),
        drop_path_decay=("linear", _CODE),
        label_smoothing=(0.1, _CODE),
        mixup=(0.8, _FINETUNE),
        cutmix=(1.0, _FINETUNE),
        magnitude=(9.0, f"{_CODE}: RandAugment of 9 / 0.5"),
        erasing=(0.25, _FINETUNE),
        repeated_augmentation=(1, f"{_CODE}: none"),
        test_crop_ratio=(0.875, f"{_CODE}: resized to 256, cropped to 224"),
    )
