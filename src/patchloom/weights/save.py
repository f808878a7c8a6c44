"""One way out for weights."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.class_names import check_class_names
from patchloom.models.foreign import ForeignNetwork
from patchloom.models.fused import FusedNetwork
from patchloom.models.network import Network, unwrapped
from patchloom.weights.delta import difference
from patchloom.weights.files import write
from patchloom.weights.foreign import tensors_of
from patchloom.weights.layouts import from_ours, written_config


def save(model: Network, path: str | PathLike[str], layout: str = "patchloom") -> None:
    """Write a network's weights as safetensors, in our layout, the official repository's or timm's.

    Whatever the layout, the file's metadata carries config, preprocessing and class names, so `load` needs no hint.
    A compiled, data-parallel or averaged network is saved as the network inside it.
    """
    if not isinstance(path, str | PathLike):
        raise PatchloomError(f"Weights are saved to a path, not to {path!r}.")
    network = unwrapped(model)
    about = describe(network, layout)
    write(Path(path), _tensors(network, layout), about)


def _tensors(network: Network, layout: str) -> dict[str, Tensor]:
    if isinstance(network, ForeignNetwork):
        return tensors_of(network, layout)
    return from_ours(network.state_dict(), network.config, layout)


def save_delta(model: Network, path: str | PathLike[str], base: Network, label: str = "a network") -> None:
    """Write only what differs from `base`, for `load(path, base=...)`; `label` tells people what the base is."""
    network = unwrapped(model)
    changed, about = difference(network, unwrapped(base), label)
    write(Path(path), changed, {**describe(network, "patchloom"), "delta": about})


def describe(network: Network, layout: str) -> dict[str, Any]:
    """What travels with weights."""
    if isinstance(network, FusedNetwork):
        raise PatchloomError("A fused copy has no weights of its own: save the network that it was made from.")
    config, names = network.config, network.class_names
    return {
        "layout": layout,
        "config": written_config(config, layout).to_json(),
        "preprocessing": network.preprocessing.to_json(),
        "class_names": None if names is None else check_class_names(names, config.num_classes),
    }
