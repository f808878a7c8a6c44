"""One way in for weights: a path, a state dict, a published tag or a hub repository, in any known layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.layers.mixing import ClassMLP, CrossPatchLinear
from patchloom.layers.positions import resize_positions
from patchloom.models.class_names import check_class_names
from patchloom.models.config import Config, PatchConfig, as_size
from patchloom.models.foreign import TIMM
from patchloom.models.imagenet import CLASSES, imagenet_names
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork, patch_network
from patchloom.models.preprocessing import Preprocessing, default_preprocessing
from patchloom.models.registry import build, config_from_json, list_models
from patchloom.models.roles import parameter_roles
from patchloom.weights import delta, foreign, hub, resize
from patchloom.weights.files import Checkpoint, read, unwrap
from patchloom.weights.infer import check_described, infer_config
from patchloom.weights.layouts import State, their_name, to_ours
from patchloom.weights.report import LoadReport

Source = str | PathLike[str] | Mapping[str, Tensor]


# what may be asked of our own files, which tell all that decides what is computed
_FREE_HINTS = ("drop_path", "drop_path_decay", "name", "scale_trainable")


@torch.inference_mode(False)  # what is built under inference_mode could never be trained
def load(
    source: Source,
    *,
    img_size: int | tuple[int, int] | None = None,
    source_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    in_chans: int | None = None,
    strict: bool = True,
    base: Source | Network | None = None,
    **hints: Any,
) -> Network:
    """A network with weights, in eval mode; `model.load_report` says what happened to every tensor.

    `source` is a .safetensors or .pth file, a state dict, a published tag ("cait_s24.fb_dist_in1k") or a repository of
    the Hugging Face hub ("hf-hub:owner/name"); the layout is ours, the official repository's or timm's. Our own files
    describe their network; for others it is read off the tensors, and `hints` (heads=...) say what tensors cannot.
    "timm:NAME" is a network of timm with the weights that timm publishes, "timm:NAME:FILE" with those of a file.

    Args:
        img_size: The wanted size; positions and cross-patch matrices are resized to it.
        source_size: (height, width) that the weights were made at, where neither img_size nor a square fits.
        num_classes: Another number starts the head from scratch.
        in_chans: Another number adapts the stem.
        strict: Refuse missing and unknown tensors by name; False reports them instead.
        base: For a delta: the weights that it was made from. With a network, what did not change is shared, not copied:
            many fine-tuned networks then take little more memory than one.
    """
    if isinstance(source, str) and source.startswith(TIMM):
        return foreign.load_timm(source, img_size, num_classes, in_chans, **hints)
    checkpoint = _fetch(source, img_size)
    if "delta" in checkpoint.about:
        base = (
            base if base is None or isinstance(base, Network) else load(base, **{**delta.hints_of(checkpoint), **hints})
        )
        checkpoint, hints = delta.join(checkpoint, base), {}
    elif base is not None:
        raise PatchloomError(f"{checkpoint.label} is no delta: it needs no base.")
    if foreign.describes_timm(checkpoint):
        return foreign.restore(checkpoint, img_size, num_classes, in_chans, strict, **hints)
    layout, state, unused = to_ours(checkpoint.tensors, checkpoint.about.get("layout"))
    if "head.0.weight" in checkpoint.tensors and "config" not in checkpoint.about:  # official: one query a class
        hints = {"queries": "per_class", **hints}
    origin = _describe(checkpoint, state, img_size, source_size, hints)
    if "config" in checkpoint.about:
        check_described(origin, state, checkpoint.label, strict)
    _assume_imagenet(checkpoint, state, origin)
    wanted = _wanted(origin, img_size, num_classes, in_chans)
    report = LoadReport(checkpoint.label, layout, wanted.name, unused=unused, notes=checkpoint.notes)
    shape = _shape_of(wanted, checkpoint.label)
    _fit_sizes(state, origin, shape, report)
    _drop_other_heads(state, origin, shape, num_classes is not None, report)
    _match(state, shape, report, strict)
    model = shape.to_empty(device="cpu") if _covers(report, shape) else patch_network(build(wanted))
    own = model.state_dict()
    with torch.no_grad():
        for name in report.loaded:
            own[name].copy_(state[name])
    _take_along(checkpoint.about, origin, model)
    model.load_report = report
    if "delta" in checkpoint.about and isinstance(base, Network):
        delta.share(model, base, [name for name in checkpoint.about["delta"]["kept"] if name not in report.resized])
    return model.eval()


def _shape_of(config: Config, label: str) -> PatchNetwork:
    """The network without memory for its weights."""
    try:
        with torch.device("meta"):
            return patch_network(build(config))
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond those that torch can count
        raise PatchloomError(f"{label} describes a network that cannot be built: {error}.") from error


def copy_scales(model: Network, source: Source, **hints: Any) -> list[str]:
    """Give a network the residual scales of other weights, such as learned LayerScale values to keep fixed (thesis
    3.5.3: make it with scale_trainable=False). Returns the names of the copied parameters; nothing else is changed.

    Raises PatchloomError unless both networks have the same scales, of the same shapes.
    """
    ours, theirs = _scales(model), _scales(load(source, **hints))
    label, name = "the state dict" if isinstance(source, Mapping) else source, model.config.name
    if not ours:
        raise PatchloomError(f"{name} has no learned scales to take from {label}: scale=layerscale adds LayerScale.")
    wrong = [key for key in {**ours, **theirs} if key not in ours or key not in theirs]
    wrong += [key for key in ours if key in theirs and ours[key].shape != theirs[key].shape]
    if wrong:
        raise PatchloomError(
            f"The scales of {label} do not fit {name}: {len(theirs)} there, {len(ours)} here, and {wrong[0]} is not "
            "the same in both. Make the network with the same depth, width and scale."
        )
    with torch.no_grad():
        for key, scale in ours.items():
            scale.copy_(theirs[key])
    return list(ours)


def _scales(model: Network) -> dict[str, Any]:
    """The scales of the residual branches, by name."""
    own = dict(model.named_parameters())
    return {name: own[name] for name, role in parameter_roles(model).items() if role == "scale"}


def _fetch(source: Source, img_size: Any) -> Checkpoint:
    if isinstance(source, Mapping):
        return Checkpoint("a state dict", unwrap(source, "The state dict"))
    if not isinstance(source, str | PathLike):
        raise PatchloomError(f"Weights are loaded from a path, a tag or a state dict, not {type(source).__name__}.")
    if hub.is_remote(source):
        return hub.fetch(str(source), None if img_size is None else as_size(img_size))
    if source in list_models() and not Path(source).exists():
        raise PatchloomError(
            f"{source} is the name of a model, not of weights: create_model({source!r}) makes it with fresh ones; "
            f"published ones have a tag, as in deit_tiny.fb_in1k."
        )
    return read(Path(source))


def _describe(
    checkpoint: Checkpoint, state: State, img_size: Any, source_size: Any, hints: dict[str, Any]
) -> PatchConfig:
    """The config of the network as it was saved."""
    if "config" not in checkpoint.about:
        inferred, notes = infer_config(state, img_size, source_size, **hints)
        checkpoint.notes += notes
        return inferred
    config = config_from_json(checkpoint.about["config"])
    assert isinstance(config, PatchConfig), "those of other libraries are read by weights/foreign.py"
    config.check_known(hints, config.name)
    own = {"source_size": config.img_size, **{name: getattr(config, name) for name in hints}}
    asked = {**hints, **({} if source_size is None else {"source_size": as_size(source_size)})}
    for name, value in asked.items():
        if name not in _FREE_HINTS and value != own[name]:
            raise PatchloomError(f"{checkpoint.label} says that {name} is {own[name]!r}; {value!r} contradicts it.")
    return config.replace(**hints)


def _assume_imagenet(checkpoint: Checkpoint, state: State, config: Config) -> None:
    """What bare weights leave open: 1000 classes are ImageNet's, and so are mean and standard deviation."""
    about, has_head = checkpoint.about, any(name.startswith("head") for name in state)
    if {"config", "class_names"}.isdisjoint(about) and config.num_classes == CLASSES and has_head:
        about["class_names"] = imagenet_names()
        checkpoint.notes.append("the 1000 classes are taken to be ImageNet's: the file has no class names")
    if "preprocessing" not in about:
        assumed = default_preprocessing(config.family, config.img_size, config.in_chans)
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (assumed.mean, assumed.std))
        note = f"mean {mean} and standard deviation {std} are assumed, as for ImageNet: the file does not carry them"
        checkpoint.notes.append(note)
        _warn_once(f"{checkpoint.label}: {note}.")


@cache
def _warn_once(message: str) -> None:
    """Fine-tuning loads a file twice."""
    logging.getLogger("patchloom").warning(message)


def _wanted(origin: PatchConfig, img_size: Any, num_classes: int | None, in_chans: int | None) -> PatchConfig:
    changes: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    changes["img_size"] = None if img_size is None else as_size(img_size)
    return origin.replace(**{key: value for key, value in changes.items() if value is not None})


def _fit_sizes(state: State, origin: PatchConfig, model: PatchNetwork, report: LoadReport) -> None:
    """Resize in `state` what depends on the grid of patches or on the input channels, where the model has others."""
    old, new = origin.grid, model.config.grid
    channels = model.config.in_chans
    for name, how in _size_dependent(model).items():
        if name not in state or (origin.in_chans == channels if how is None else old == new):
            continue
        before = state[name].float()
        state[name] = resize.resize_channels(before, channels) if how is None else how(before, old, new)
        grids = "" if how is None else f" (grid {old[0]} x {old[1]} -> {new[0]} x {new[1]})"
        report.resized[name] = f"{_shape(before)} -> {_shape(state[name])}{grids}"


def _size_dependent(model: PatchNetwork) -> dict[str, Callable[..., Tensor] | None]:
    """The tensors that depend on the grid, with what resizes them; and the stem's first kernel, with None."""
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


def _drop_other_heads(state: State, origin: Config, model: Network, asked: bool, report: LoadReport) -> None:
    """Another number of classes was asked for: heads, and queries of one class each, start afresh."""
    old, new = origin.num_classes, model.config.num_classes
    headless = asked and not any(name.startswith("head") for name in state)
    for name, target in model.state_dict().items():
        of_classes = name.startswith(("head.", "head_distill.")) or (name == "class_token" and model.per_class)
        if of_classes and headless and name not in state:
            report.reinitialised[name] = f"no head in the file, {new} classes asked for"
        elif of_classes and old != new and name in state and state[name].shape != target.shape:
            report.reinitialised[name] = f"{old} classes in the file, {new} asked for"
            del state[name]


def _match(state: State, model: Network, report: LoadReport, strict: bool) -> None:
    """Note what fits by name and shape; refuse or note the rest."""
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
            problems += "If it averages its patches, pass aggregation='average'. "
        raise PatchloomError(f"{report.source} does not fit {report.model}. {problems}strict=False loads the rest.")


def _list(title: str, names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{title}: {', '.join(names[:most])}{more}. " if names else ""


def _covers(report: LoadReport, model: Network) -> bool:
    """Whether the file holds all that the network has: then the costly random start can be spared."""
    held = set(report.loaded)
    return all(name in held for name, _ in [*model.named_parameters(), *model.named_buffers()])


def _take_along(about: Mapping[str, Any], origin: Config, model: Network) -> None:
    """Preprocessing and class names travel with the weights."""
    if "preprocessing" in about:
        recorded = Preprocessing.from_json(about["preprocessing"])
        if len(recorded.mean) != origin.in_chans:
            raise PatchloomError(f"Preprocessing has {len(recorded.mean)} channels, the network {origin.in_chans}.")
        if model.config.in_chans == origin.in_chans:
            model.preprocessing = replace(recorded, img_size=model.config.img_size)
    if about.get("class_names") and model.config.num_classes == origin.num_classes:
        model.class_names = check_class_names(about["class_names"], origin.num_classes)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"
