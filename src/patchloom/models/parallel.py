"""Parallel ViTs ("Three things everyone should know about ViT"): D blocks of P attentions side by side, then P FFNs.

`vit_{tiny,small,base,large}_{D}x{P}` for any D and P; those that the paper uses are listed. `vit_base_13x1` is ViT-B13
of its comparison of stems (Table 7): one more block instead of a costlier stem.
"""

from __future__ import annotations

from patchloom.errors import PatchloomError
from patchloom.models.deit import SIZES
from patchloom.models.registry import Paper, register, register_pattern
from patchloom.models.vit import VitConfig

_LISTED = {
    "tiny": ("12x1", "6x2", "24x1", "12x2"),
    "small": ("12x1", "6x2", "24x1", "12x2", "36x1", "18x2", "12x3", "9x4", "60x1", "30x2", "20x3"),
    "base": ("12x1", "13x1", "6x2", "24x1", "12x2", "36x1", "18x2"),
    "large": ("24x1", "12x2"),
}


def parallel_vit(name: str, size: str, depth: str, branches: str) -> VitConfig:
    """The config of vit_{size}_{depth}x{branches}; with scale="layerscale" it starts at 1e-4, as published."""
    if int(depth) < 1 or int(branches) < 1:
        raise PatchloomError(f"{name} has no blocks or no branches; vit_{size}_12x1 is the smallest published depth.")
    dim, heads = SIZES[size]
    return VitConfig(
        name=name, family="vit", dim=dim, heads=heads, depth=int(depth), branches=int(branches), scale_rule="fixed"
    )


for _size, _shapes in _LISTED.items():
    for _shape in _shapes:
        register(
            parallel_vit(f"vit_{_size}_{_shape}", _size, *_shape.split("x")), Paper("Three things, sections 3 and 5")
        )
register_pattern(r"vit_(tiny|small|base|large)_(\d+)x(\d+)", parallel_vit)
