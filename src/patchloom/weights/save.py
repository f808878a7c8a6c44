"""`save`: write the weights of a network, all of them or only the difference to a base."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.class_names import check_class_names
from patchloom.models.embedding import EmbeddingNetwork
from patchloom.models.foreign import ForeignNetwork
from patchloom.models.fused import FusedNetwork
from patchloom.models.network import Network, unwrapped
from patchloom.weights.delta import difference
from patchloom.weights.files import write
from patchloom.weights.foreign import tensors_of
from patchloom.weights.layouts import from_ours, written_config


def save(model: Network, path: str | PathLike[str], layout: str = "patchloom") -> None:
    """Write the weights of a network as safetensors, in patchloom's layout, the official repositories' or timm's.

    In every layout the metadata of the file has config, preprocessing and class names, so that `load` needs no hints.
    For a compiled, data-parallel or averaged network, the network inside it is saved. Raises PatchloomError if the
    file cannot be written or the layout does not support the network.

    Args:
        path: ends with .safetensors; written aside and renamed, so that it is never half a file.
        layout: "patchloom", "official" or "timm".
    """
    if not isinstance(path, str | PathLike):
        raise PatchloomError(f"save needs a path, not {path!r}.")
    network = unwrapped(model)
    metadata = describe(network, layout)
    write(Path(path), _tensors(network, layout), metadata)


def _tensors(network: Network, layout: str) -> dict[str, Tensor]:
    if isinstance(network, ForeignNetwork):
        return tensors_of(network, layout)
    if isinstance(network, EmbeddingNetwork):
        if layout != "patchloom":
            raise PatchloomError(f"{network.config.name} can be saved in the layout patchloom, not {layout!r}.")
        return dict(network.state_dict())
    return from_ours(network.state_dict(), network.config, layout)


def save_delta(model: Network, path: str | PathLike[str], base: Network, label: str = "a network") -> None:
    """Write only the tensors that differ from `base`, for `load(path, base=...)`; `label` names the base in errors."""
    network = unwrapped(model)
    changed, metadata = difference(network, unwrapped(base), label)
    write(Path(path), changed, {**describe(network, "patchloom"), "delta": metadata})


def describe(network: Network, layout: str) -> dict[str, Any]:
    """The metadata that is saved with weights: layout, config, preprocessing, class names and their column.

    Raises:
        PatchloomError: the network is a fused copy, whose tensors are products of the original ones.
    """
    if isinstance(network, FusedNetwork):
        raise PatchloomError("A fused copy cannot be saved. Save the network it was made from.")
    config, names = network.config, network.class_names
    column = {} if network.label_column is None else {"label_column": network.label_column}
    return {
        **column,
        "layout": layout,
        "config": written_config(config, layout).to_json(),
        "preprocessing": network.preprocessing.to_json(),
        "class_names": None if names is None else check_class_names(names, config.num_classes),
    }
