"""DeiT III (thesis ch. 6): plain ViTs with LayerScale 1e-4, positions on patches only, uniform stochastic depth."""

from __future__ import annotations

from patchloom.models.registry import Paper, register
from patchloom.models.vit import VitConfig

_MODELS = {  # dim, heads, depth, branches, patch size
    "deit3_tiny": ((192, 3, 12, 1, 16), Paper("DeiT III Table 6.14", 5.7, 1.3)),
    "deit3_small": ((384, 6, 12, 1, 16), Paper("DeiT III, thesis ch. 6", 22.0, 4.6)),
    "deit3_medium": ((512, 8, 12, 1, 16), Paper("DeiT III published models", 38.8, 8.0)),
    "deit3_base": (
        (768, 12, 12, 1, 16),
        Paper("DeiT III, thesis ch. 6", 86.6, 17.6, "the README prints 17.5 billion MACs"),
    ),
    "deit3_large": ((1024, 16, 24, 1, 16), Paper("DeiT III, thesis ch. 6", 304.4, 61.6)),
    "deit3_huge": ((1280, 16, 32, 1, 14), Paper("DeiT III, thesis ch. 6", 632.1, 167.4)),
    "deit3_huge_52": ((1280, 16, 52, 1, 14), Paper("DeiT III Table 6.6")),
    "deit3_huge_26x2": ((1280, 16, 26, 2, 14), Paper("DeiT III Table 6.6")),
}

for _name, ((_dim, _heads, _depth, _branches, _patch), _paper) in _MODELS.items():
    register(
        VitConfig(
            name=_name,
            family="deit3",
            dim=_dim,
            heads=_heads,
            depth=_depth,
            branches=_branches,
            patch_size=_patch,
            scale="layerscale",
            scale_rule="fixed",
        ),
        _paper,
    )
