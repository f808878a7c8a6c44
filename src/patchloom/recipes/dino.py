"""DINO: Caron et al. 2021, as thesis 4.3.2 trains ResMLP and ViT with it."""

from __future__ import annotations

from patchloom.recipes.cited import Cited, cite
from patchloom.recipes.pretraining import PretrainingOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.small import SUFFIX

_THESIS = "thesis 4.3.2"
_CODE = "Caron et al. 2021, published code"
_LOG = "Caron et al. 2021, published command of ViT-S for 300 epochs"
_SMALL = "ours, for thousands of small images on a CPU"

_PUBLISHED: dict[str, Cited] = {
    "method": ("dino", _THESIS),
    "epochs": (300, f"{_THESIS}: ResMLP-S12"),
    "batch_size": (1024, _LOG),
    "optimizer": ("adamw", _CODE),
    "lr": (2e-3, f"{_CODE}: 5e-4 per 256 images"),
    "lr_scaling": ("linear", f"{_CODE}: 5e-4 per 256 images"),
    "warmup_epochs": (10.0, _CODE),
    "warmup_lr": (0.0, _CODE),
    "min_lr": (1e-6, _CODE),
    "weight_decay": (0.04, _CODE),
    "weight_decay_end": (0.4, f"{_CODE}: along a cosine"),
    "no_decay": (("norm", "scale"), f"{_CODE}: none for vectors and biases; tokens and positions decay"),
    "clip_grad": (3.0, f"{_CODE}, where it limits the norm of each tensor; here that of all together"),
    "drop_path": (0.1, _CODE),
    "resolution": (224, _CODE),
    "crop_scale": (0.4, f"{_CODE}: global crops of 0.4 to 1"),
    "flip": (0.5, _CODE),
    "augmentation": ("none", f"{_CODE}: colours, blur and solarisation alone"),
    "color_jitter": (0.4, f"{_CODE}: brightness and contrast, with probability 0.8"),
    "saturation": (0.2, _CODE),
    "hue": (0.1, _CODE),
    "erasing": (0.0, f"{_CODE}: none"),
    "local_crops": (8, _CODE),
    "local_size": (96, _CODE),
    "local_scale": ((0.05, 0.4), _CODE),
    "gray": (0.2, _CODE),
    "blur": (2.0, f"{_CODE}: with probability 1 and 0.1 for the global crops, 0.5 for local ones"),
    "solarize": (0.2, f"{_CODE}: of the second global crop"),
    "prototypes": (65_536, _CODE),
    "head_hidden": (2048, _CODE),
    "head_bottleneck": (256, _CODE),
    "student_temperature": (0.1, _CODE),
    "teacher_temperature": (0.07, _LOG),
    "teacher_temperature_start": (0.04, _CODE),
    "teacher_warmup_epochs": (30.0, _LOG),
    "teacher_momentum": (0.996, _CODE),
    "teacher_momentum_end": (1.0, f"{_CODE}: along a cosine"),
    "center_momentum": (0.9, _CODE),
    "freeze_last_layer": (1.0, _CODE),
    "neighbours": (20, f"{_CODE}: 10, 20, 100 and 200 are tried; 20 is usual"),
    "test_crop_ratio": (0.875, f"{_CODE}: resize to 256, crop 224"),
}

DINO = cite(
    Recipe.of(PretrainingOptions, name="dino", summary="self-distillation without labels, for every family"),
    **_PUBLISHED,
)

DINO_SMALL = cite(
    DINO.replace(name=f"dino{SUFFIX}", summary="dino adapted to small images and a CPU"),
    epochs=(60, _SMALL),
    batch_size=(64, _SMALL),
    lr=(1e-3, _SMALL),
    lr_scaling=("none", f"{_SMALL}: the rate is kept at every batch size"),
    warmup_epochs=(2.0, _SMALL),
    drop_path=(0.0, _SMALL),
    resolution=(None, f"{_SMALL}: the model's own"),
    crop_scale=(0.5, f"{_SMALL}: half of a small image still shows something"),
    local_crops=(4, _SMALL),
    local_size=(None, f"{_SMALL}: half of the network's"),
    local_scale=((0.2, 0.5), _SMALL),
    saturation=(0.0, f"{_SMALL}: colours tell small images apart"),
    hue=(0.0, f"{_SMALL}: colours tell small images apart"),
    gray=(0.0, f"{_SMALL}: colours tell small images apart"),
    blur=(0.0, f"{_SMALL}: a radius of 2 pixels leaves nothing of a small image"),
    solarize=(0.0, _SMALL),
    prototypes=(256, _SMALL),
    head_hidden=(256, _SMALL),
    head_bottleneck=(64, _SMALL),
    teacher_temperature=(0.04, f"{_SMALL}: {_CODE}'s default"),
    teacher_warmup_epochs=(0.0, _SMALL),
    teacher_momentum=(0.96, f"{_SMALL}: short runs need a teacher that follows faster"),
    teacher_momentum_end=(0.995, f"{_SMALL}: likewise"),
    test_crop_ratio=(1.0, f"{_SMALL}: the whole image"),
)
