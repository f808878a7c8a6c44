"""The network behind an index: opened with what its file does not say, and recognised by a digest."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError
from patchloom.inference.models import Model, open_model
from patchloom.models.foreign import is_timm
from patchloom.models.network import Network, unwrapped
from patchloom.text import with_tuples
from patchloom.weights.files import digest
from patchloom.weights.hub import is_remote
from patchloom.weights.load import load

_COLOURS = ("mean", "std")


def open_weights(weights: Model, hints: Mapping[str, Any] | None = None, device: Device = "auto") -> Network:
    """A network of images in eval mode. `hints` are what a file of weights does not say: options of the network, and
    mean and std of its input."""
    options = dict(hints or {})
    colours = {name: options.pop(name) for name in _COLOURS if options.get(name) is not None}
    # Only a file without metadata needs options of the network, and `open_model` takes none.
    if not options:
        network = open_model(weights, device=device)
    elif isinstance(weights, str | PathLike):
        chosen = choose_device(device)
        network = load(weights, **options).to(chosen)
    else:
        raise PatchloomError("Options of the network are for weights that are loaded from a file.")
    if colours:
        own = network.preprocessing
        mean, std = (_per_channel(colours.get(name, getattr(own, name)), len(own.mean)) for name in _COLOURS)
        network.preprocessing = dataclasses.replace(own, mean=mean, std=std)
    return network


def _per_channel(value: Any, channels: int) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (float(value),) * channels
    numbers = tuple(float(one) for one in value)
    return numbers * channels if len(numbers) == 1 else numbers


def network_digest(network: Network) -> str:
    """The same for networks that embed alike: equal tensors and preprocessing. The order of classes does not count."""
    inner = unwrapped(network)
    return digest(json.dumps(inner.preprocessing.to_json(), sort_keys=True), inner.state_dict())


def describe_weights(weights: Model, network: Network, hints: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an index remembers of its network."""
    named = isinstance(weights, str | PathLike)
    return {
        "weights": _place(weights) if isinstance(weights, str | PathLike) else None,
        "digest": network_digest(network),
        "name": network.config.name,
        "hints": {name: list(v) if isinstance(v, tuple) else v for name, v in (hints or {}).items()} if named else {},
        "label_column": getattr(network, "label_column", None),
    }


def _place(weights: str | PathLike[str]) -> str:
    """Absolute, so that the index can be used from any folder; tags of published weights stay as they are."""
    text = os.fspath(weights)
    if is_timm(text) or is_remote(text):
        return text
    return str(Path(text).resolve())


def reopen(model: Mapping[str, Any], index: Path, weights: Model | None = None, device: Device = "auto") -> Network:
    """The network that an index was built with, from the place that it remembers or from `weights`.

    Raises:
        PatchloomError: It is not there, or the weights there are others.
    """
    given = weights if weights is not None else model["weights"]
    if given is None:
        raise PatchloomError(f"{index} was built with a network in memory: name its weights (--weights).")
    hints = with_tuples(model["hints"])
    if not isinstance(given, str | PathLike):
        network = open_weights(given, None, device)
    elif weights is None and _gone(given):
        raise PatchloomError(
            f"The weights that {index} was built with are not at {given} any more. Name them with --weights."
        )
    else:
        network = open_weights(given, hints, device)
    check_digest(model, network, index, given)
    return network


def _gone(place: str | PathLike[str]) -> bool:
    text = os.fspath(place)
    return not (is_timm(text) or is_remote(text) or Path(text).exists())


def check_digest(model: Mapping[str, Any], network: Network, index: Path, weights: Any = None) -> None:
    """Refuse a network other than the one that the index was built with."""
    if network_digest(network) != model["digest"]:
        named = f" of {weights}" if isinstance(weights, str | PathLike) else ""
        raise PatchloomError(
            f"The index {index} was built with other weights ({model['name']}) than those{named}: its vectors cannot "
            "be compared with theirs. Build an index with these weights, or use the ones it was built with."
        )
