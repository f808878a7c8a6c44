"""Small networks of our own, in no paper: 32-pixel images, patches of 4, for quick experiments on a CPU."""

from __future__ import annotations

from typing import Any

from patchloom.models.patchconvnet import PatchConvNetConfig
from patchloom.models.registry import Paper, find_config, register
from patchloom.models.resmlp import ResmlpConfig

_OURS = Paper("ours, for small images")
_SMALL: dict[str, Any] = {"img_size": (32, 32), "patch_size": 4, "dim": 96}

for _name, _like in {"deit_nano": "deit_tiny", "deit3_nano": "deit3_tiny", "cait_nano": "cait_xxs24"}.items():
    register(find_config(_like).replace(name=_name, depth=6, **_SMALL), _OURS)
register(ResmlpConfig(name="resmlp_nano", family="resmlp", depth=8, **_SMALL), _OURS)
register(PatchConvNetConfig(name="patchconvnet_nano", family="patchconvnet", depth=16, **_SMALL), _OURS)
