"""DeiT (thesis ch. 3): ViTs trained on ImageNet alone, with an optional distillation token.

The class token, the distillation token and every patch have a position; stochastic depth rises with depth.
"""

from __future__ import annotations

from patchloom.models.registry import Paper, register
from patchloom.models.vit import VitConfig

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}  # dim, heads

_PRINTED = {
    "deit_tiny": Paper("DeiT Table 3.1", 5),
    "deit_small": Paper("DeiT Tables 3.1, 3.17", 22, 4.6),
    "deit_base": Paper("DeiT Tables 3.1, 3.17", 86, 17.5),
    "deit_tiny_distilled": Paper("DeiT Table 3.5", 6),
    "deit_small_distilled": Paper("DeiT Table 3.5", 22),
    "deit_base_distilled": Paper("DeiT Table 3.5", 87),
}

for _name, _paper in _PRINTED.items():
    _size = _name.split("_")[1]
    register(
        VitConfig(
            name=_name,
            family="deit",
            dim=SIZES[_size][0],
            heads=SIZES[_size][1],
            positions="all",
            distilled=_name.endswith("distilled"),
            drop_path_decay="linear",
        ),
        _paper,
    )
