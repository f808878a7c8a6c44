"""The published weights that `load` accepts as MODEL.TAG.

The list is written out because importing timm's catalogue takes seconds; a test compares the two.
"""

from __future__ import annotations

_IN1K = ("fb_in1k",)
_IN1K_AND_22K = ("fb_in1k", "fb_in22k_ft_in1k")
_CAIT = ("fb_dist_in1k",)

PUBLISHED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"deit_{size}{kind}" for kind in ("", "_distilled") for size in ("tiny", "small", "base")), _IN1K),
    **dict.fromkeys((f"deit3_{size}" for size in ("small", "medium", "base", "large", "huge")), _IN1K_AND_22K),
    **dict.fromkeys((f"cait_{size}" for size in ("xxs24", "xxs36", "xs24", "s24", "s36", "m36", "m48")), _CAIT),
    **dict.fromkeys(("resmlp_s12", "resmlp_s24"), ("fb_dino", "fb_distilled_in1k", "fb_in1k")),
    "resmlp_s36": ("fb_distilled_in1k", "fb_in1k"),
    "resmlp_b24_p8": ("fb_distilled_in1k", "fb_in1k", "fb_in22k_ft_in1k"),
}
