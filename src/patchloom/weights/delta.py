"""Deltas: files with only the tensors that fine-tuning changed, and the checksum of the base that has the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.weights.files import Checkpoint, digest


def difference(network: Network, base: Network, label: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of `network` that differ from its base, and the metadata of a delta, which describes the base.

    Args:
        label: the base's name, for the error message of a wrong base.
    """
    theirs, ours = base.state_dict(), network.state_dict()
    # Bitwise equality: frozen tensors are exactly those of the base.
    kept = [name for name, tensor in ours.items() if name in theirs and torch.equal(theirs[name], tensor)]
    changed = {name: tensor for name, tensor in ours.items() if name not in kept}
    # A bare base file does not tell the number of heads; the delta remembers it.
    hints = {"heads": base.config.heads} if hasattr(base.config, "heads") else {}
    return changed, {"base": label, "sha256": checksum(base), "kept": kept, "hints": hints}


def hints_of(delta: Checkpoint) -> dict[str, Any]:
    """Options of the base that a bare weight file cannot tell (the number of heads), as recorded in the delta."""
    metadata = delta.metadata["delta"]
    return dict(metadata.get("hints", {})) if isinstance(metadata, Mapping) else {}


def join(delta: Checkpoint, base: Network | None) -> Checkpoint:
    """A checkpoint with the tensors of a delta and of its base; those of the base are not copied.

    Raises PatchloomError if the base is missing or is not the one that the delta was made from.
    """
    metadata = delta.metadata["delta"]
    if not isinstance(metadata, Mapping) or not {"base", "sha256", "kept"} <= set(metadata):
        raise PatchloomError(f"{delta.label} is damaged: it does not name its base.")
    was = f"it was made from {metadata['base']} (SHA-256 {metadata['sha256'][:12]}...)"
    if base is None:
        raise PatchloomError(f"{delta.label} is a delta. Pass its base, as in load(delta, base=...): {was}.")
    # Unchanged tensors come from the base: another base would give a network that was never trained.
    if checksum(base) != metadata["sha256"]:
        raise PatchloomError(f"{delta.label} does not belong to this base: {was}, and this base has other weights.")
    theirs = base.state_dict()
    tensors = {**{name: theirs[name] for name in metadata["kept"]}, **delta.tensors}
    return Checkpoint(delta.label, tensors, delta.metadata, delta.notes)


def share(network: Network, base: Network, names: list[str]) -> None:
    """Replace the tensors `names` of a network by those of its base, so that both use the same memory.

    `setattr` puts the very parameter objects of the base into the network, not only their values.
    """
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(path), leaf, getattr(base.get_submodule(path), leaf))


def checksum(network: nn.Module) -> str:
    """SHA-256 of all parameters and buffers."""
    return digest("", {name: tensor.cpu() for name, tensor in network.state_dict().items()})
