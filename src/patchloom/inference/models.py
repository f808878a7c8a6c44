"""A model from anywhere, ready to compute."""

from __future__ import annotations

import dataclasses
from os import PathLike
from typing import Any

import torch

from patchloom.errors import PatchloomError
from patchloom.models.foreign import is_foreign
from patchloom.models.network import Network, unwrapped
from patchloom.models.preprocessing import Preprocessing
from patchloom.weights.load import load

Model = Network | str | PathLike[str]


def open_model(model: Model, resolution: int | None = None, base: Model | None = None) -> Network:
    """A network in eval mode, on the GPU where there is one."""
    if is_foreign(model):
        raise PatchloomError(f"{model} is a network of timm or ONNX: only `evaluate` and `--disagreement` take those.")
    if isinstance(model, str | PathLike):
        network = load(model, img_size=resolution, base=base)
    else:
        network = unwrapped(model)
        if resolution is not None and network.config.img_size != (resolution, resolution):
            raise PatchloomError("Another resolution needs weights that are loaded: save the model, evaluate the file.")
    return network.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def test_preprocessing(network: Any, crop_ratio: float | None) -> Preprocessing:
    """How a network is tested: as its weights say, or with another crop."""
    if crop_ratio is None:
        return network.preprocessing
    return dataclasses.replace(network.preprocessing, crop_ratio=crop_ratio)
