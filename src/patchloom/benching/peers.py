"""Peers to compare with: the same network in timm with the same weights, or the form of the published code."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.kernels import native
from patchloom.layers.mixing import ConvBranch
from patchloom.layers.scales import LayerScale
from patchloom.layers.stems import Stem
from patchloom.models.config import Config
from patchloom.models.network import Network
from patchloom.models.registry import create_model, find_config, list_models
from patchloom.weights.hub import is_remote, timm_name
from patchloom.weights.load import load
from patchloom.weights.timm_networks import timm_network

PEERS = ("timm", "published")


def check_case(name: str, against: str | None, size: int, depth: int | None, int8: bool) -> None:
    """Raise PatchloomError if a case cannot be measured, before anything is measured."""
    if has_weights(name):
        if depth is not None or against == "timm":
            raise PatchloomError(
                f"--depths and --against timm build models by name, and {name} is one with weights: leave them out."
            )
        ours = _network(name, size, depth)
    else:
        # Shapes only, without memory: a wrong name is found at once.
        with torch.device("meta"):
            ours = _network(name, size, depth)
    if against == "timm":
        _timm_names(name)
    if against == "published":
        _refuse_published(ours)
    if int8 and not native.available():
        raise PatchloomError(f"--int8 needs the C++ kernels: {native.why_not()}")


def has_weights(name: str) -> bool:
    """Whether a name stands for a model with weights, such as a run folder, a file or a published tag."""
    return name not in list_models() and (Path(name).exists() or is_remote(name))


def case_config(name: str) -> Config:
    """The config of a model by name, or of one with weights."""
    return load(name).config if has_weights(name) else find_config(name)


def _network(name: str, size: int, depth: int | None) -> Network:
    return load(name, img_size=size) if has_weights(name) else create_model(name, **_options(size, depth))


def _options(size: int, depth: int | None) -> dict[str, Any]:
    return {"img_size": size, **({} if depth is None else {"depth": depth})}


def pair(name: str, against: str | None, size: int, depth: int | None = None) -> tuple[Network, nn.Module | None]:
    """(our network, the peer or None), with equal weights and in eval mode."""
    if against == "timm":
        return timm_pair(name, size, depth)
    ours = _network(name, size, depth)
    stir(ours)
    ours.eval()
    return ours, published_form(ours) if against == "published" else None


def timm_pair(name: str, size: int, depth: int | None) -> tuple[Network, nn.Module]:
    """(our network, timm's network) with equal weights; with `depth`, timm's network is built with as many blocks.

    Raises:
        PatchloomError: timm has no such network.
    """
    known = _timm_names(name)
    if depth is None:
        full = next((full for full in known if full.endswith(f"_{size}")), known[0])
        theirs = import_timm().create_model(full, img_size=size).eval()
    else:
        theirs = timm_network(find_config(name).replace(**_options(size, depth))).eval()
    stir(theirs)
    # Our network gets timm's weights, so that the logits can be compared.
    return load(theirs.state_dict()), theirs


def _timm_names(name: str) -> list[str]:
    """timm's names of a patchloom network, one per image size."""
    base = timm_name(name)
    known = import_timm().list_models(f"{base}_*") if base else []
    if found := [full for full in known if re.fullmatch(rf"{base}_\d+", full)]:
        return found
    raise PatchloomError(
        f"timm has no network like {name}. Leave out --against, or use --against published for PatchConvNet."
    )


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Add small noise to every parameter: some start at or near zero, which would hide a difference."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


def published_form(model: Network) -> nn.Module:
    """A PatchConvNet as in the authors' code: a permute before and after every block, and scale and addition as
    separate operations."""
    _refuse_published(model)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ConvBranch | Stem):
            # The plain form of these layers permutes the map to channels first and back.
            module.fast = False
        elif isinstance(module, LayerScale):
            module.forward = partial(_separately, module)  # type: ignore[method-assign]
    return model


def _refuse_published(model: Network) -> None:
    if model.config.family != "patchconvnet":
        raise PatchloomError(
            f"--against published supports PatchConvNet only, not {model.config.name}. Use --against timm."
        )


def _separately(scale: LayerScale, total: Tensor, y: Tensor) -> Tensor:
    return total + scale.of(y)
