"""Which tensors of a file fit a network, by name and shape, and those that are resized to another grid of patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.layers.mixing import ClassMLP, CrossPatchLinear
from patchloom.layers.positions import resize_positions
from patchloom.models.config import PatchConfig
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork
from patchloom.weights import resize
from patchloom.weights.layouts import State, their_name
from patchloom.weights.report import LoadReport


def fit_sizes(state: State, origin: PatchConfig, model: PatchNetwork, report: LoadReport) -> None:
    """Resize in place the tensors that depend on the grid of patches or the input channels, if the model has others."""
    old, new = origin.grid, model.config.grid
    channels = model.config.in_chans
    for name, resize_grid in _size_dependent(model).items():
        # None as function means "depends on channels", hence the two conditions.
        if name not in state or (origin.in_chans == channels if resize_grid is None else old == new):
            continue
        before = state[name].float()
        resized = resize.resize_channels(before, channels) if resize_grid is None else resize_grid(before, old, new)
        state[name] = resized
        grids = "" if resize_grid is None else f" (grid {old[0]} x {old[1]} -> {new[0]} x {new[1]})"
        report.resized[name] = f"{_shape(before)} -> {_shape(state[name])}{grids}"


def _size_dependent(model: PatchNetwork) -> dict[str, Callable[..., Tensor] | None]:
    """Names of the tensors that depend on the grid, with the function that resizes them; the first kernel of the stem,
    which depends on the channels, has None."""
    found: dict[str, Callable[..., Tensor] | None] = {}
    if model.positions is not None:
        found["positions"] = partial(resize_positions, prefix=model.position_prefix)
    for name, module in model.named_modules():
        if isinstance(module, CrossPatchLinear):
            found[f"{name}.weight"] = resize.resize_cross_patch
            found[f"{name}.bias"] = resize.resize_patch_vector
        elif isinstance(module, ClassMLP):
            found[f"{name}.weight"] = resize.resize_class_mlp
    kernels = [name for name, tensor in model.stem.state_dict(prefix="stem.").items() if tensor.ndim == 4]
    return {**found, kernels[0]: None}


def match_tensors(state: State, model: Network, report: LoadReport, strict: bool) -> None:
    """Record in the report which tensors fit by name and shape; refuse the others, or record them if not `strict`."""
    own = model.state_dict()
    for name, tensor in state.items():
        if name not in own:
            report.unused.append(name)
        elif own[name].shape != tensor.shape:
            raise PatchloomError(
                f"{report.source}: {name} has shape {_shape(tensor)} where {report.model} needs {_shape(own[name])}."
            )
        elif own[name].is_floating_point() != tensor.is_floating_point():
            raise PatchloomError(f"{report.source}: {name} holds {tensor.dtype}, not floating-point weights.")
        else:
            report.loaded.append(name)
    report.missing = [name for name in own if name not in state and name not in report.reinitialised]
    if strict and (report.missing or report.unused):
        missing = [their_name(name, model.config, report.layout) for name in report.missing]
        problems = _list("Missing", missing) + _list("Unknown", report.unused)
        if "class_token" in report.missing:
            problems += "If the network averages its patches, pass aggregation='average'. "
        raise PatchloomError(
            f"{report.source} does not fit {report.model}. {problems}Pass strict=False to load the rest."
        )


def _list(title: str, names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{title}: {', '.join(names[:most])}{more}. " if names else ""


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"
