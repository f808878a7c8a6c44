"""CaiT (thesis 3.5, 3.6; ICCV): LayerScale, talking heads, and a class token that meets the patches only at the end.

The trunk updates patches; then `class_depth` blocks of class-attention update the class token and leave the patches.
"""

from __future__ import annotations

from patchloom.models.registry import Paper, register
from patchloom.models.vit import VitConfig

DIMS = {"xxs": 192, "xs": 288, "s": 384, "m": 768, "b": 768}  # always 48 channels a head

_MODELS = {
    "cait_xxs24": Paper("CaiT Table 3", 12.0, 2.5),
    "cait_xxs36": Paper("CaiT Table 3", 17.3, 3.7, "thesis Table 3.15 prints 3.8"),
    "cait_xs24": Paper("CaiT Table 3", 26.6, 5.4),
    "cait_xs36": Paper("CaiT Table 3", 38.6, 8.1),
    "cait_s24": Paper("CaiT Table 3", 46.9, 9.4),
    "cait_s36": Paper("CaiT Table 3", 68.2, 13.9),
    "cait_s48": Paper("CaiT Table 3", 89.5, 18.6),
    "cait_m24": Paper("CaiT Table 3", 185.9, 36.0),
    "cait_m36": Paper("CaiT Table 3", 270.9, 53.7),
    "cait_m48": Paper("thesis Table 3.17", 356, None, "printed at 448 pixels, with 329.6 billion MACs"),
    "cait_b12": Paper("thesis Table 6.13", 100.0, 18.2, "100.0 is the count without the 1000-class head"),
}

for _name, _paper in _MODELS.items():
    _size, _depth = _name[5:].rstrip("0123456789"), int(_name[-2:])
    register(
        VitConfig(
            name=_name,
            family="cait",
            dim=DIMS[_size],
            heads=DIMS[_size] // 48,
            depth=_depth,
            talking_heads=True,
            scale="layerscale",
            aggregation="class_attention",
        ),
        _paper,
    )
