"""A model from anywhere, ready to compute."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError
from patchloom.models.foreign import is_onnx
from patchloom.models.fused import fuse
from patchloom.models.network import Network, evaluation_mode, unwrapped
from patchloom.models.preprocessing import Preprocessing
from patchloom.weights.load import load

Model = Network | str | PathLike[str]


def open_model(
    model: Model, resolution: int | None = None, base: Model | None = None, device: Device = "auto"
) -> Network:
    """A network in eval mode, on the device that `choose_device` gives; one that is handed over stays where it is,
    unless a device is named.

    Raises:
        PatchloomError: an ONNX file, a network of text, or another resolution for a network that is built already.
    """
    chosen = choose_device(device)  # before hours of downloading
    if is_onnx(model):
        raise PatchloomError(f"{model} is an ONNX file: only `distill` and `evaluate` without --probe take those.")
    if isinstance(model, str | PathLike):
        network = load(model, img_size=resolution, base=base)
        check_images(network, model)
    else:
        network = unwrapped(model)
        if resolution is not None and network.config.img_size != (resolution, resolution):
            raise PatchloomError(
                "The resolution of a network in memory cannot be changed: save it, and evaluate the file."
            )
        if device in (None, "auto"):
            return network.eval()
    return network.to(chosen).eval()


def open_fused(
    model: Model,
    resolution: int | None = None,
    base: Model | None = None,
    device: Device = "auto",
    *,
    int8: bool = False,
) -> Network:
    """A fused copy of what `open_model` gives; a network that is handed over stays in its mode."""
    with evaluating(model):
        return fuse(open_model(model, resolution, base, device), int8=int8)


def evaluating(model: Model) -> AbstractContextManager[None]:
    """`evaluation_mode` of the caller's network. A model that is loaded belongs to nobody else: nothing to restore."""
    return nullcontext() if isinstance(model, str | PathLike) else evaluation_mode(unwrapped(model))


def check_images(network: Any, source: object) -> None:
    """Raise PatchloomError for a loaded network that takes text; `source` is where it came from."""
    if network.config.kind != "image":
        raise PatchloomError(f"{source} is a network of {network.config.kind}, and this command needs one of images.")


def check_head(network: Any, source: object) -> None:
    """Raise PatchloomError for a network without a head; `source` is where it came from."""
    if getattr(network.config, "headless", False):
        raise PatchloomError(
            f"{source} is a network without a head: it has features, but no classes. `patchloom finetune` trains a "
            "classifier from it, `patchloom evaluate --probe knn` measures its features."
        )


def weights_of(network: Any) -> str | None:
    """Which weights a network has: "raw" or "averaged" if they come from a run that says so, else None."""
    return getattr(getattr(network, "load_report", None), "weights", None)


def weights_text(network: Any) -> str | None:
    """One line about the file of a network's weights, and whether they are averaged; None if none was loaded."""
    report = getattr(network, "load_report", None)
    if report is None:
        return None
    kind = f"{report.weights} weights" if report.weights else "weights"
    return f"{network.config.name} with the {kind} of {report.source}."


def test_preprocessing(network: Any, crop_ratio: float | None) -> Preprocessing:
    """How a network is tested: as its weights say, or with another crop."""
    if crop_ratio is None:
        return network.preprocessing
    return dataclasses.replace(network.preprocessing, crop_ratio=crop_ratio)
