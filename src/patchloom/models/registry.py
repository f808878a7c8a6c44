"""Names of models: each stands for a config, so listing them builds nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config, ImageSize, as_size
from patchloom.models.network import Network


@dataclass(frozen=True)
class Paper:
    """Where a model is printed, with the millions of parameters and billions of MACs (at 224 pixels) printed there."""

    source: str
    params: float | None = None
    macs: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A listed model: its config, and where it is printed."""

    config: Config
    paper: Paper


_ENTRIES: dict[str, Entry] = {}
_PATTERNS: list[tuple[re.Pattern[str], Callable[..., Config]]] = []
_BUILDERS: dict[str, tuple[type[Config], Callable[[Any], Network]]] = {}


def register(config: Config, paper: Paper) -> None:
    """Give `config` its place in the table of models."""
    _ENTRIES[config.name] = Entry(config, paper)


def register_pattern(pattern: str, make: Callable[..., Config]) -> None:
    """Names that are not listed one by one: `make(name, *groups)` for every name that the pattern matches."""
    _PATTERNS.append((re.compile(pattern), make))


def register_architecture(config: type[Config], network: Callable[[Any], Network]) -> None:
    """What builds a network from a config of this type."""
    _BUILDERS[config.architecture] = (config, network)


def entries(pattern: str = "*", kind: str | None = "image") -> list[Entry]:
    """The listed models whose names match a shell pattern, in the order of the papers.

    `kind` is what they take, "image" or "text"; None: anything.
    """
    if not isinstance(pattern, str):
        raise PatchloomError(f"Models are listed by a pattern such as 'cait_*', not {pattern!r}.")
    kinds = sorted({entry.config.kind for entry in _ENTRIES.values()})
    if kind not in (None, *kinds):
        raise PatchloomError(f"Unknown kind {kind!r} of models. Choose from: {', '.join(kinds)}.")
    found = [entry for name, entry in _ENTRIES.items() if fnmatchcase(name, pattern)]
    return [entry for entry in found if kind in (None, entry.config.kind)]


def list_models(pattern: str = "*", kind: str | None = None) -> list[str]:
    """The names of the listed models that match a shell pattern such as "cait_*".

    `kind` limits them to what they take, "image" or "text".
    """
    return [entry.config.name for entry in entries(pattern, kind)]


def find_config(name: str) -> Config:
    """The config that a name stands for; an unknown name is refused with the nearest known."""
    if not isinstance(name, str):
        raise PatchloomError(f"A model is called by its name, not by {name!r}.")
    if name in _ENTRIES:
        return _ENTRIES[name].config
    for pattern, make in _PATTERNS:
        if match := pattern.fullmatch(name):
            return make(name, *match.groups())
    raise PatchloomError(
        f"There is no model {name!r}.{did_you_mean(name, _ENTRIES)} `patchloom models` lists them all."
    )


def config_from_json(values: Any) -> Config:
    """The inverse of BaseConfig.to_json."""
    if not isinstance(values, dict):
        raise PatchloomError(f"A network is described by an object of options, not by {values!r}.")
    values = dict(values)
    architecture = values.pop("architecture", None)
    if not isinstance(architecture, str) or architecture not in _BUILDERS:
        raise PatchloomError(
            f"The file describes a network of architecture {architecture!r}; known: {sorted(_BUILDERS)}."
        )
    config = _BUILDERS[architecture][0]
    if config.kind == "image":
        values["img_size"] = as_size(values.get("img_size"))
    # From the defaults, so that unknown and missing options are treated alike: refused, or left at their default.
    return config().replace(**values)


@torch.inference_mode(False)  # what is built under inference_mode could never be trained
def build(config: Config) -> Network:
    """The network that a config describes."""
    return _BUILDERS[config.architecture][1](config)


def rebuild(network: Network, tensors: Mapping[str, Tensor]) -> Network:
    """A plain copy of a network, with these tensors: one in training may be compiled, sharded or synchronised."""
    copy = build(network.config)
    copy.load_state_dict(dict(tensors))
    for name in ("class_names", "label_column", "preprocessing"):
        setattr(copy, name, getattr(network, name))
    return copy


def create_model(
    name: str, num_classes: int = 1000, img_size: ImageSize | None = None, in_chans: int = 3, **options: Any
) -> Network:
    """A network by name, with fresh weights.

    `img_size` is a number or (height, width), the model's own by default. Further options are the fields of its
    config: dim, depth, heads, patch_size, stem, norm, scale, aggregation, drop_path and what the family adds. A network
    for text has no classes, image size or channels, but a vocab_size and a max_length.
    """
    config = find_config(name)
    if img_size is not None:
        options["img_size"] = as_size(img_size)
    # For networks of text the defaults stand for "not given"; anything else reaches `replace`, which refuses it.
    own = {"num_classes": (num_classes, 1000), "in_chans": (in_chans, 3)}
    for option, (value, default) in own.items():
        if config.kind == "image" or value != default:
            options[option] = value
    return build(config.replace(**options))
