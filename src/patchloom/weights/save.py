"""One way out for weights."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from patchloom.models.network import Network
from patchloom.weights.files import write
from patchloom.weights.layouts import from_ours, written_config


def save(model: Network, path: str | PathLike[str], layout: str = "patchloom") -> None:
    """Write a network's weights as safetensors, in our layout, the official repository's or timm's.

    Whatever the layout, the file's metadata carries config, preprocessing and class names, so `load` needs no hint.
    """
    about = {
        "layout": layout,
        "config": written_config(model.config, layout).to_json(),
        "preprocessing": model.preprocessing.to_json(),
        "class_names": model.class_names,
    }
    write(Path(path), from_ours(model.state_dict(), model.config, layout), about)
