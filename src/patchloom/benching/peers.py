"""What a user would run instead of ours: the same network of timm's with the same weights, or the published form."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.layers.mixing import ConvBranch
from patchloom.layers.scales import LayerScale
from patchloom.layers.stems import Stem
from patchloom.models.network import Network
from patchloom.models.registry import create_model
from patchloom.weights.hub import timm_name
from patchloom.weights.load import load

PEERS = ("timm", "published")


def pair(name: str, against: str | None, size: int, depth: int | None = None) -> tuple[Network, nn.Module | None]:
    """(ours, the peer) with equal weights, ready to answer; no peer where none is asked for."""
    options = {"img_size": size, **({} if depth is None else {"depth": depth})}
    if against == "timm":
        return timm_pair(name, size, depth)
    ours = create_model(name, **options)
    stir(ours)
    ours.eval()
    return ours, published_form(ours) if against == "published" else None


def timm_pair(name: str, size: int, depth: int | None) -> tuple[Network, nn.Module]:
    timm = import_timm()
    base = timm_name(name)
    known = [full for full in timm.list_models(f"{base}_*") if re.fullmatch(rf"{base}_\d+", full)] if base else []
    if not known:
        raise PatchloomError(
            f"timm has no network like {name}: leave --against out, or choose --against published for PatchConvNet."
        )
    full = f"{base}_{size}" if f"{base}_{size}" in known else known[0]
    options: dict[str, Any] = {"img_size": size}
    if depth is not None:
        options["num_blocks" if full.startswith("resmlp") else "depth"] = depth
    theirs = timm.create_model(full, **options).eval()
    stir(theirs)
    return load(theirs.state_dict()), theirs


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Move every parameter a little: some start at or near zero, which would hide a difference."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


def published_form(model: Network) -> nn.Module:
    """A PatchConvNet as the authors' code computes it: a permute on either side of every block, scale and addition
    apart."""
    if model.config.family != "patchconvnet":
        raise PatchloomError(f"--against published is for PatchConvNet, not for {model.config.name}: choose timm.")
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ConvBranch | Stem):
            module.fast = False
        elif isinstance(module, LayerScale):
            module.forward = partial(_separately, module)  # type: ignore[method-assign]
    return model


def _separately(scale: LayerScale, total: Tensor, y: Tensor) -> Tensor:
    return total + scale.of(y)
