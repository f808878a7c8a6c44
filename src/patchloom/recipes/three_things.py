"""Three things everyone should know about Vision Transformers: Touvron et al., ECCV 2022; ViTs trained with A2.

It reaches 83 % with a sequential ViT-L without LayerScale in 300 epochs (quoted from the paper).
"""

from __future__ import annotations

from patchloom.models.config import PatchConfig
from patchloom.recipes.cait import drop_rate
from patchloom.recipes.cited import Cited, Size, cite, derive, for_patches, nearest, size_of
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.rsb import RESNET_A2

_PAPER = "Three things, baseline"

# Width and depth: size, learning rate, drop rate.
_ROWS: dict[Size, tuple[str, float, float]] = {
    (192, 12): ("ViT-Ti", 4e-3, 0.0),
    (384, 12): ("ViT-S", 4e-3, 0.05),
    (768, 12): ("ViT-B", 3e-3, 0.1),
    (1024, 24): ("ViT-L", 3e-3, 0.4),
}
_REFERENCE: Size = (384, 12)


def vit_a2(model: PatchConfig | None = None) -> Recipe:
    """A ViT without LayerScale, 300 epochs; ViT-S's values without a model."""
    return _for_model(_VIT_A2, model)


def vit_a2_ls(model: PatchConfig | None = None) -> Recipe:
    """A ViT with LayerScale, 400 epochs; ViT-S's values without a model."""
    return _for_model(_VIT_A2_LS, model)


def _for_model(recipe: Recipe, model: PatchConfig | None) -> Recipe:
    (size, lr, rate), remark = nearest(_ROWS, model) if model else (_ROWS[_REFERENCE], "")
    return cite(
        recipe,
        lr=(lr, f"{_PAPER}: {lr:g} for {size} (4e-3 for Ti and S, 3e-3 for B and L){remark}"),
        drop_path=_drop_path(model, (rate, f"{_PAPER}: {rate:g} for {size}; the same in every block{remark}")),
    )


def _drop_path(model: PatchConfig | None, row: Cited) -> Cited:
    """The paper's row; deeper networks than it lists (it prints no rates for them) follow CaiT's rule where that gives
    more."""
    if model is None or size_of(model) in _ROWS or size_of(model)[1] <= 12:
        return for_patches(model, row)
    rate, source = drop_rate(model)
    if rate <= row[0]:
        return for_patches(model, row)
    return rate, f"{_PAPER}: not printed for deeper networks; inferred for {model.name}, as cait: {source}"


_VIT_A2 = derive(
    RESNET_A2,
    "as A2",
    "vit_a2",
    "ViT on ImageNet-1k, procedure A2; rates by model",
    epochs=(300, _PAPER),
    resolution=(224, _PAPER),
    seed=(0, _PAPER),
    weight_decay=(0.02, "as A2: thesis Table 6.1"),
    drop_path_decay=("uniform", _PAPER),
    scale=("none", f"{_PAPER}: without LayerScale"),
    layerscale=(None, f"{_PAPER}: without LayerScale"),
    test_crop_ratio=(0.95, "inferred, as A2: not stated for ViTs"),
)

_VIT_A2_LS = derive(
    _VIT_A2,
    "as vit_a2",
    "vit_a2_ls",
    "ViT with LayerScale on ImageNet-1k, procedure A2; rates by model",
    epochs=(400, _PAPER),
    scale=("layerscale", f"{_PAPER}: with LayerScale"),
    layerscale=(1e-4, "published code: 1e-4"),
)
