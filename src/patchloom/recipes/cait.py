"""CaiT: Touvron et al., Going deeper with Image Transformers, ICCV 2021 (thesis chapter 3).

It reaches 82.7 % with CaiT-S24 and 83.8 % with CaiT-M36 at 224 pixels (quoted from thesis Table 3.15).
"""

from __future__ import annotations

from patchloom.layers.scales import layerscale_value, uniform_drop_rate
from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, Size, cite, derive, for_patches, nearest_depth, size_of
from patchloom.recipes.deit import DEIT
from patchloom.recipes.recipe import Recipe

# Width and depth: size, drop rate of thesis Table 3.16, drop rate of ICCV Table 3 (None where it has no such row).
_RATES: dict[Size, tuple[str, float, float | None]] = {
    (192, 24): ("XXS-24", 0.05, 0.1),
    (192, 36): ("XXS-36", 0.1, 0.1),
    (288, 24): ("XS-24", 0.05, 0.1),
    (288, 36): ("XS-36", 0.1, 0.2),
    (384, 24): ("S-24", 0.1, 0.1),
    (384, 36): ("S-36", 0.2, 0.2),
    (384, 48): ("S-48", 0.3, 0.3),
    (768, 24): ("M-24", 0.2, 0.2),
    (768, 36): ("M-36", 0.3, 0.3),
    (768, 48): ("M-48", 0.4, None),
}
_REFERENCE: Size = (384, 24)
_MOST = 0.5

# Depth: drop rate of the depth study.
_STUDY: dict[int, Cited] = {
    12: (0.05, "thesis Table 3.11: 0.05 for 12 blocks"),
    18: (0.1, "thesis Table 3.11: 0.1 for 18 blocks"),
    24: (0.2, "thesis Table 3.11: 0.2 for 24 blocks"),
    36: (0.25, "thesis Table 3.11: 0.25 for 36 blocks"),
    48: (0.3, "the supplement, A.1: 0.3 for 48 blocks"),
}


def cait(model: PatchConfig | None = None) -> Recipe:
    """DeiT's procedure for longer, with the drop rate and LayerScale's start of the model; CaiT-S24's without one."""
    size = size_of(model) if model else _REFERENCE
    return cite(_CAIT, drop_path=drop_rate(model), layerscale=_layerscale(*size))


def depth_study(model: PatchConfig | None = None) -> Recipe:
    """DeiT's procedure with the drop rate of the depth study; 12 blocks' without a model."""
    depth = size_of(model)[1] if model else 12
    (rate, source), remark = nearest_depth(_STUDY, depth)
    drop_path = for_patches(model, (rate, source + remark))
    return cite(_DEPTH_STUDY, drop_path=drop_path, layerscale=_layerscale(384, depth))


def drop_rate(model: PatchConfig | None) -> Cited:
    """The drop rate of Table 3.16, or of the papers' rule for a model that it does not list."""
    return for_patches(model, _drop_rate(size_of(model) if model else _REFERENCE))


def _drop_rate(size: Size) -> Cited:
    if size in _RATES:
        name, rate, iccv = _RATES[size]
        other = f"ICCV Table 3: {iccv}" if iccv is not None else "ICCV Table 3 has no such row"
        return rate, f"thesis Table 3.16: {rate} for {name} ({other}); default here the thesis; the same in every block"
    # Printed as min(0.1 depth / 12 - 1, 0), never positive; as max it gives Table 3.16's own values for S. The text
    # (3.5.2) raises it by 0.1 at width 768 and lowers it below 384, where the table has half of it.
    # It grows without bound: columns of 120 convolutional blocks would get 1.
    width, depth = size
    rate, rule = uniform_drop_rate(depth), "max(0.1 (depth / 12 - 1), 0)"
    if width >= 768:
        rate, rule = rate + 0.1, f"{rule} + 0.1 from width 768 on"
    elif width < 384:
        rate, rule = rate / 2, f"{rule} / 2 below width 384"
    if rate > _MOST:
        rate, rule = _MOST, f"{rule}, at most {_MOST}, the highest rate of thesis Table 6.14"
    return round(rate, 4), f"inferred for width {width}, depth {depth}: {rule} (thesis 3.5.2 and Table 3.16)"


def _layerscale(width: int, depth: int) -> Cited:
    source = f"thesis 3.5.1, by depth (here {depth}): 0.1 up to 18, 1e-5 up to 24, 1e-6 deeper"
    if (width, depth) == (192, 36):
        source += "; the published code has 1e-5 for XXS-36; default here the papers' 1e-6"
    return layerscale_value(depth), source


_CAIT = derive(
    DEIT,
    "as DeiT (thesis 3.7)",
    "cait",
    "CaiT on ImageNet-1k; drop rate and LayerScale by model",
    epochs=(400, "thesis 3.7"),
    batch_size=(1024, "thesis 3.7"),
    lr=(1e-3, "thesis 3.7: 1e-3 at batch 1024"),
    lr_scaling=("none", "thesis 3.7: not scaled further"),
    weight_decay=(0.05, "thesis 3.7"),
    warmup_epochs=(5.0, "thesis 3.7"),
    repeated_augmentation=(3, "author's answer in issue 104 of the published code: three repeats for 400 epochs too"),
    drop_path_decay=("uniform", "thesis 3.5.2: the same rate in every block"),
    scale=("layerscale", "thesis 3.5.1"),
    test_crop_ratio=(1.0, "thesis 3.7; the supplement reports some tables at 0.875; default here 1.0"),
)

_DEPTH_STUDY = derive(
    DEIT,
    "as DeiT (thesis 3.5.3)",
    "depth_study",
    "DeiT-S at 12 to 48 blocks with any model.scale (Table 3.11); drop rate by depth",
    epochs=(300, "thesis Table 3.11"),
    drop_path_decay=("uniform", "thesis Table 3.11: uniform; 0.05 is DeiT's linear 0.1 in expectation"),
    scale=(None, "as the model says: the study compares them (model.scale=...)"),
)
