"""Deltas: only what fine-tuning changed, with the checksum of the base that has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.weights.files import Checkpoint, digest


def difference(network: Network, base: Network, label: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of `network` that are not those of its base, and what a delta says of the base."""
    theirs, ours = base.state_dict(), network.state_dict()
    kept = [name for name, tensor in ours.items() if name in theirs and torch.equal(theirs[name], tensor)]
    changed = {name: tensor for name, tensor in ours.items() if name not in kept}
    hints = {"heads": base.config.heads} if hasattr(base.config, "heads") else {}
    return changed, {"base": label, "sha256": checksum(base), "kept": kept, "hints": hints}


def hints_of(delta: Checkpoint) -> dict[str, Any]:
    """What a bare file of weights does not say, and the delta knows of its base."""
    about = delta.about["delta"]
    return dict(about.get("hints", {})) if isinstance(about, Mapping) else {}


def join(delta: Checkpoint, base: Network | None) -> Checkpoint:
    """A delta with the tensors of its base; they stay where they are, uncopied."""
    about = delta.about["delta"]
    if not isinstance(about, Mapping) or not {"base", "sha256", "kept"} <= set(about):
        raise PatchloomError(f"{delta.label} is damaged: it does not say what its base is.")
    was = f"it was made from {about['base']} (SHA-256 {about['sha256'][:12]}...)"
    if base is None:
        raise PatchloomError(f"{delta.label} is a delta and needs its base, as in load(delta, base=...): {was}.")
    if checksum(base) != about["sha256"]:
        raise PatchloomError(f"{delta.label} does not belong to this base: {was}, and the one given has other weights.")
    theirs = base.state_dict()
    tensors = {**{name: theirs[name] for name in about["kept"]}, **delta.tensors}
    return Checkpoint(delta.label, tensors, delta.about, delta.notes)


def share(network: Network, base: Network, names: list[str]) -> None:
    """Let a network use the very tensors of its base for what did not change."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(path), leaf, getattr(base.get_submodule(path), leaf))


def checksum(network: nn.Module) -> str:
    """Of all parameters and buffers."""
    return digest("", {name: tensor.cpu() for name, tensor in network.state_dict().items()})
