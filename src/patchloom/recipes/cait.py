"""CaiT: Touvron et al., Going deeper with Image Transformers, ICCV 2021 (thesis chapter 3).

It reaches 82.7 % with CaiT-S24 and 83.8 % with CaiT-M36 at 224 pixels (quoted from thesis Table 3.15).
"""

from __future__ import annotations

from patchloom.layers.scales import layerscale_value, uniform_drop_rate
from patchloom.models.config import Config
from patchloom.recipes.cited import Cited, Size, cite, derive
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


def cait(model: Config | None = None) -> Recipe:
    """DeiT's procedure for longer, with the drop rate and LayerScale's start of the model; CaiT-S24's without one."""
    size = (model.dim, model.depth) if model else _REFERENCE
    return cite(_CAIT, drop_path=_drop_path(size), layerscale=_layerscale(size))


def _drop_path(size: Size) -> Cited:
    if size not in _RATES:
        # Printed as min(0.1 depth / 12 - 1, 0), never positive; as max it gives Table 3.16's own values for S.
        rule = "the papers' rule for width 384, max(0.1 (depth / 12 - 1), 0)"
        return round(uniform_drop_rate(size[1]), 4), f"inferred for width {size[0]}, depth {size[1]}: {rule}"
    name, rate, iccv = _RATES[size]
    other = f"ICCV Table 3: {iccv}" if iccv is not None else "ICCV Table 3 has no such row"
    return rate, f"thesis Table 3.16: {rate} for {name} ({other}); default here the thesis; the same in every block"


def _layerscale(size: Size) -> Cited:
    source = f"thesis 3.5.1, by depth (here {size[1]}): 0.1 up to 18, 1e-5 up to 24, 1e-6 deeper"
    if size == (192, 36):
        source += "; the published code has 1e-5 for XXS-36; default here the papers' 1e-6"
    return layerscale_value(size[1]), source


_CAIT = derive(
    DEIT,
    "as DeiT (thesis 3.7)",
    "cait",
    "CaiT on ImageNet-1k; drop rate and LayerScale by model",
    epochs=(400, "thesis 3.7"),
    batch_size=(1024, "thesis 3.7"),
    lr=(1e-3, "thesis 3.7: 1e-3 at batch 1024, not scaled further"),
    weight_decay=(0.05, "thesis 3.7"),
    warmup_epochs=(5.0, "thesis 3.7"),
    repeated_augmentation=(3, "author's answer in issue 104 of the published code: three repeats for 400 epochs too"),
    test_crop_ratio=(1.0, "thesis 3.7; the supplement reports some tables at 0.875; default here 1.0"),
)
