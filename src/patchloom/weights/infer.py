"""Inference of a network's config from its state dict (under patchloom's names), and the check of a saved config."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.config import PatchConfig
from patchloom.models.registry import entries
from patchloom.models.vit import VitConfig
from patchloom.weights.layouts import State, count
from patchloom.weights.options import Parts, find_reader

# options that tensors do not tell, or that do not make it another model
_IGNORED = {
    *("name", "family", "num_classes", "img_size", "in_chans", "head"),
    *("drop_path", "drop_path_decay", "dropout", "scale_value", "scale_rule"),
}


def infer_config(state: State, wanted: Any = None, source: Any = None, **hints: Any) -> tuple[PatchConfig, list[str]]:
    """The config of the network that has these tensors, and notes on what had to be assumed.

    Args:
        state: Tensors under patchloom's names.
        wanted: The requested image size. A number of positions that fits it is assumed to be of that size, any other
            to be of a square.
        source: (height, width) of the images that the weights were trained on, if known.
        hints: Options that tensors do not tell.

    Raises:
        PatchloomError: No known network has such tensors, or options cannot be determined.
    """
    parts = Parts(state)
    if not parts.trunk:
        raise PatchloomError(f"No known network has the tensors {', '.join(sorted(state)[:3])} ...")
    # Every architecture has tensors that no other one has: its reader is found by their names.
    kind, read = find_reader(parts)
    kind.check_known(hints, "The network in the file")
    try:
        # Shapes give widths and depths. Numbers of heads are in no shape: they come from hints or from the listed
        # models.
        options = read(parts, wanted, source, hints)
    except IndexError as error:
        raise PatchloomError(f"A tensor has fewer dimensions than its name requires ({error}).") from error
    # Hints come last: the caller knows more than the tensors.
    return _named(kind(**{**options, **hints}), hints), parts.notes


def check_described(config: PatchConfig, state: State, label: str, strict: bool) -> None:
    """Raise PatchloomError if the tensors of a file contradict its config, before a network of that size is built.

    Without `strict`, tensors may be missing, and with them blocks, branches and heads.
    """
    positions = config.patches + getattr(config, "position_prefix", 0)
    for option, found in _measured(config, state).items():
        value = getattr(config, option)
        expected, what = (positions, "positions") if option == "img_size" else (value, option)
        # Fewer blocks than the config says: a shortened file, which may be loaded without `strict`.
        incomplete = not strict and option in ("depth", "class_depth", "branches") and expected > found
        if expected != found and not incomplete:
            raise PatchloomError(f"{label} has {option}={value} in its config, but its tensors have {what} {found}.")


def _measured(config: PatchConfig, state: State) -> dict[str, int]:
    """The options that determine the size of a network, measured on tensors; `img_size` as a number of positions."""
    # Only kernels of convolutions have four dimensions.
    kernels = [(name, tensor) for name, tensor in state.items() if name.startswith("stem.proj.") and tensor.ndim == 4]
    # Several convolutions in a row: the first one reads the image.
    first = min(kernels, key=lambda pair: [int(part) for part in pair[0].split(".") if part.isdigit()], default=None)
    norms = (t for name, t in state.items() if re.fullmatch(r"blocks\..*norm\.(weight|bias|alpha|beta)", name))
    sizes = {
        "depth": count(state, r"blocks\.(\d+)\."),
        "class_depth": count(state, r"pool\.(\d+)\."),
        "branches": count(state, r"blocks\.\d+\.mixing\.branches\.(\d+)\."),
        "in_chans": first[1].shape[1] if first else 0,
        "dim": next((tensor.shape[0] for tensor in norms if tensor.ndim == 1), 0),
        "num_classes": next((state[n].shape[0] for n in ("head.bias", "head_distill.bias") if _has(state, n, 1)), 0),
        "img_size": state["positions"].shape[1] if _has(state, "positions", 3) else 0,
    }
    return {option: size for option, size in sizes.items() if size and hasattr(config, option)}


def _has(state: State, name: str, dimensions: int) -> bool:
    """Whether there is a tensor of this name with this number of dimensions."""
    return name in state and state[name].ndim == dimensions


def _named(config: PatchConfig, hints: dict[str, Any]) -> PatchConfig:
    """The config with name, and options that tensors do not tell, of the registered model of this shape, if any."""
    # A config that equals that of a listed model gets its name, and with it the paper's drop rate, scale and crop.
    for entry in entries():
        listed = entry.config
        if type(listed) is type(config) and all(
            getattr(listed, field.name) == getattr(config, field.name)
            for field in fields(config)
            if field.name not in _IGNORED
        ):
            measured = {name: getattr(config, name) for name in ("num_classes", "img_size", "in_chans", "head")}
            return listed.replace(**{**measured, **hints})
    return config.replace(**{"family": _family(config), **hints})


def _family(config: PatchConfig) -> str:
    """The family whose papers describe this architecture most closely."""
    if not isinstance(config, VitConfig):
        return config.architecture
    if config.talking_heads or config.aggregation == "class_attention":
        return "cait"
    # DeiT has positions for its prefix tokens, DeiT III for patches only.
    if config.position_prefix:
        return "deit"
    return "deit3" if config.scale == "layerscale" and config.branches == 1 else "vit"
