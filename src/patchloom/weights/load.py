"""`load`: a network from a path, a state dict, a published tag or a hub repository, in any known layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.class_names import check_class_names
from patchloom.models.config import BaseConfig, Config, PatchConfig, as_size
from patchloom.models.foreign import TIMM
from patchloom.models.imagenet import CLASSES, imagenet_names
from patchloom.models.network import Network
from patchloom.models.patch_network import patch_network
from patchloom.models.preprocessing import Preprocessing, default_preprocessing
from patchloom.models.registry import build, config_from_json, list_models
from patchloom.models.roles import parameter_roles
from patchloom.weights import delta, embedding, foreign, hub
from patchloom.weights.files import Checkpoint, read, unwrap
from patchloom.weights.infer import check_described, infer_config
from patchloom.weights.layouts import State, to_ours
from patchloom.weights.matching import fit_sizes, match_tensors
from patchloom.weights.pretrained import encoder_of
from patchloom.weights.report import LoadReport
from patchloom.weights.shape import shape_of

Source = str | PathLike[str] | Mapping[str, Tensor]


# options that may differ from those in our own files, since they do not change what the network computes
_FREE_HINTS = ("drop_path", "drop_path_decay", "name", "scale_trainable")


@torch.inference_mode(False)  # parameters that are created in inference mode could not be trained
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
    """Load a network with its weights, in eval mode. `model.load_report` tells what happened to every tensor.

    `source` is a .safetensors or .pth file, a run folder, a state dict, a published tag ("cait_s24.fb_dist_in1k") or a
    repository of the Hugging Face hub ("hf-hub:owner/name"), in patchloom's layout, the official repositories' or
    timm's. Files of patchloom describe their network. For others the network is inferred from the tensors, and `hints`
    (heads=...) supply what tensors do not tell. "timm:NAME" is a network of timm with the weights that
    timm publishes, "timm:NAME:FILE" with those of a file.

    Args:
        img_size: The image size; positions and cross-patch matrices are resized to it.
        source_size: (height, width) of the images that the weights were trained on, if neither img_size nor a square
            matches the number of positions.
        num_classes: The number of classes; if it differs from the file, the head is initialised from scratch.
        in_chans: The number of input channels; if it differs from the file, the stem is adapted.
        strict: Whether to refuse missing and unknown tensors; False lists them in the report.
        base: For a delta: the weights that it was made from. If this is a network, unchanged tensors are shared, not
            copied, so that many fine-tuned networks take little more memory than one.

    Raises:
        PatchloomError: The weights cannot be read, or do not fit the network.
    """
    if isinstance(source, str) and source.startswith(TIMM):
        return foreign.load_timm(source, img_size, num_classes, in_chans, **hints)
    checkpoint = _fetch(source, img_size)
    if "delta" in checkpoint.metadata:
        base = (
            base if base is None or isinstance(base, Network) else load(base, **{**delta.hints_of(checkpoint), **hints})
        )
        checkpoint, hints = delta.join(checkpoint, base), {}
    elif base is not None:
        raise PatchloomError(f"{checkpoint.label} is not a delta: leave out base.")
    if foreign.describes_timm(checkpoint):
        return foreign.restore(checkpoint, img_size, num_classes, in_chans, strict, **hints)
    if embedding.describes_embedding(checkpoint):
        return embedding.restore(checkpoint, img_size, num_classes, in_chans, strict, **hints)
    if (other := _not_of_images(checkpoint)) is not None:
        given = {"img_size": img_size, "source_size": source_size, "num_classes": num_classes, "in_chans": in_chans}
        return _load_described(checkpoint, other, {**given, **hints}, strict)
    task = checkpoint.metadata.get("task")
    if task is not None and "config" not in checkpoint.metadata:  # as `Task.finish` exports modules of the user's own
        raise PatchloomError(
            f"{checkpoint.label} holds modules of the task {task!r}, not a network of patchloom: build them yourself, "
            "and read their tensors with safetensors.torch.load_file."
        )
    encoder, ignored = _encoder_of(checkpoint)
    layout, state, unused = to_ours(encoder, checkpoint.metadata.get("layout"))
    if "head.0.weight" in checkpoint.tensors and "config" not in checkpoint.metadata:  # official: one query per class
        hints = {"queries": "per_class", **hints}
    origin = _describe(checkpoint, state, img_size, source_size, hints)
    if "config" in checkpoint.metadata:
        # Before `build`: a forged config must not make us allocate gigabytes.
        check_described(origin, state, checkpoint.label, strict)
    _assume_imagenet(checkpoint, state, origin)
    wanted = _wanted(origin, img_size, num_classes, in_chans)
    if "config" not in checkpoint.metadata and wanted.headless:
        checkpoint.notes.append("the file has no head, nor does the network: num_classes=... makes one")
    report = LoadReport(
        checkpoint.label, layout, wanted.name, checkpoint.metadata.get("weights"), unused=unused, notes=checkpoint.notes
    )
    report.ignored = ignored
    # Shapes are compared on the meta device, so that nothing is allocated for weights that do not fit.
    shape = patch_network(shape_of(wanted, checkpoint.label))
    fit_sizes(state, origin, shape, report)
    _drop_other_heads(state, origin, shape, num_classes is not None, report)
    match_tensors(state, shape, report, strict)
    # Random initialisation of a large network takes seconds, and every tensor is about to be overwritten.
    model = shape.to_empty(device="cpu") if _covers(report, shape) else patch_network(build(wanted))
    own = model.state_dict()
    with torch.no_grad():
        for name in report.loaded:
            own[name].copy_(state[name])
    _set_metadata(checkpoint.metadata, origin, model)
    model.load_report = report
    if "delta" in checkpoint.metadata and isinstance(base, Network):
        delta.share(model, base, [name for name in checkpoint.metadata["delta"]["kept"] if name not in report.resized])
    return model.eval()


def _not_of_images(checkpoint: Checkpoint) -> BaseConfig | None:
    """The config of a network that takes something else than images, if the file describes one."""
    described = checkpoint.metadata.get("config")
    if not isinstance(described, dict):
        return None
    config: BaseConfig = config_from_json(described)
    return None if config.kind == "image" else config


def _load_described(checkpoint: Checkpoint, config: Any, given: Mapping[str, Any], strict: bool) -> Any:
    """A network that its file describes completely, with the metadata that the network itself knows."""
    if options := [name for name, value in given.items() if value is not None]:
        raise PatchloomError(
            f"{checkpoint.label} is a {config.name}, a network of {config.kind}: it has no {options[0]}."
        )
    report = LoadReport(
        checkpoint.label, "patchloom", config.name, checkpoint.metadata.get("weights"), notes=checkpoint.notes
    )
    shape = shape_of(config, checkpoint.label, len(checkpoint.tensors) if strict else None)
    match_tensors(checkpoint.tensors, shape, report, strict)
    network: Any = build(config)
    own = network.state_dict()
    with torch.no_grad():
        for name in report.loaded:
            own[name].copy_(checkpoint.tensors[name])
    network.set_metadata(checkpoint.metadata)
    network.load_report = report
    return network.eval()


def copy_scales(model: Network, source: Source, **hints: Any) -> list[str]:
    """Copy the residual scales of other weights into a network, such as learned LayerScale values to keep fixed (thesis
    3.5.3: create it with scale_trainable=False). Returns the names of the copied parameters; nothing else changes.

    Raises PatchloomError unless both networks have the same scales, of the same shapes.

    Args:
        model: changed in place.
        source: what `load` takes; `hints` are for it.
    """
    ours, theirs = _scales(model), _scales(load(source, **hints))
    label, name = "the state dict" if isinstance(source, Mapping) else source, model.config.name
    if not ours:
        raise PatchloomError(f"{name} has no learned scales to copy from {label}. Create it with scale=layerscale.")
    wrong = [key for key in {**ours, **theirs} if key not in ours or key not in theirs]
    wrong += [key for key in ours if key in theirs and ours[key].shape != theirs[key].shape]
    if wrong:
        raise PatchloomError(
            f"The scales of {label} do not fit {name}: {len(theirs)} there, {len(ours)} here, and {wrong[0]} is not "
            "the same in both. Create the network with the same depth, width and scale."
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
        raise PatchloomError(f"load takes a path, a tag or a state dict, not {type(source).__name__}.")
    if hub.is_remote(source):
        return hub.fetch(str(source), None if img_size is None else as_size(img_size))
    if not os.path.exists(source) and source in list_models():  # False for names that no file can have
        raise PatchloomError(
            f"{source} is the name of a model, not of weights. create_model({source!r}) makes it with random weights; "
            f"published weights have a tag, as in deit_tiny.fb_in1k."
        )
    return read(Path(source))


def _encoder_of(checkpoint: Checkpoint) -> tuple[State, dict[str, str]]:
    """The tensors of the network, without those that only pre-training uses. Files of ours hold a network alone."""
    ours = "config" in checkpoint.metadata or "layout" in checkpoint.metadata
    return (dict(checkpoint.tensors), {}) if ours else encoder_of(checkpoint.tensors, checkpoint.label)


def _describe(
    checkpoint: Checkpoint, state: State, img_size: Any, source_size: Any, hints: dict[str, Any]
) -> PatchConfig:
    """The config of the network as it was saved."""
    if "config" not in checkpoint.metadata:
        inferred, notes = infer_config(state, img_size, source_size, **hints)
        checkpoint.notes += notes
        return inferred
    config = config_from_json(checkpoint.metadata["config"])
    assert isinstance(config, PatchConfig), "those of other libraries are read by weights/foreign.py"
    config.check_known(hints, config.name)
    own = {"source_size": config.img_size, **{name: getattr(config, name) for name in hints}}
    requested = {**hints, **({} if source_size is None else {"source_size": as_size(source_size)})}
    for name, value in requested.items():
        if name not in _FREE_HINTS and value != own[name]:
            raise PatchloomError(f"{checkpoint.label} has {name}={own[name]!r}, which contradicts {value!r}.")
    return config.replace(**hints)


def _assume_imagenet(checkpoint: Checkpoint, state: State, config: Config) -> None:
    """Assume for weights without metadata that 1000 classes are ImageNet's, and mean and standard deviation too."""
    metadata, has_head = checkpoint.metadata, any(name.startswith("head") for name in state)
    if {"config", "class_names"}.isdisjoint(metadata) and config.num_classes == CLASSES and has_head:
        metadata["class_names"] = imagenet_names()
        checkpoint.notes.append("the 1000 classes are taken to be ImageNet's: the file has no class names")
    if "preprocessing" not in metadata:
        assumed = default_preprocessing(config.family, config.img_size, config.in_chans)
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (assumed.mean, assumed.std))
        note = f"mean {mean} and standard deviation {std} are assumed, as for ImageNet: the file does not contain them"
        checkpoint.notes.append(note)
        _warn_once(f"{checkpoint.label}: {note}.")


@cache
def _warn_once(message: str) -> None:
    """Log a warning once per process: a sweep over image sizes loads a file several times."""
    logging.getLogger("patchloom").warning(message)


def _wanted(origin: PatchConfig, img_size: Any, num_classes: int | None, in_chans: int | None) -> PatchConfig:
    changes: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    changes["img_size"] = None if img_size is None else as_size(img_size)
    if num_classes is not None:
        origin = origin.with_head()
    return origin.replace(**{key: value for key, value in changes.items() if value is not None})


def _drop_other_heads(state: State, origin: Config, model: Network, requested: bool, report: LoadReport) -> None:
    """Remove heads, and queries of one class each, if the number of classes changes: they start from scratch."""
    old, new = origin.num_classes, model.config.num_classes
    headless = requested and not any(name.startswith("head") for name in state)
    for name, target in model.state_dict().items():
        of_classes = name.startswith(("head.", "head_distill.")) or (name == "class_token" and model.per_class)
        if of_classes and headless and name not in state:
            report.reinitialised[name] = f"no head in the file, {new} classes requested"
        elif of_classes and old != new and name in state and state[name].shape != target.shape:
            report.reinitialised[name] = f"{old} classes in the file, {new} requested"
            del state[name]


def _covers(report: LoadReport, model: Network) -> bool:
    """Whether the file has all tensors of the network, so that the slow random initialisation can be skipped."""
    held = set(report.loaded)
    return all(name in held for name, _ in [*model.named_parameters(), *model.named_buffers()])


def _set_metadata(metadata: Mapping[str, Any], origin: Config, model: Network) -> None:
    """Give the network the preprocessing and the class names that were saved with the weights."""
    if "preprocessing" in metadata:
        recorded = Preprocessing.from_json(metadata["preprocessing"])
        if len(recorded.mean) != origin.in_chans:
            raise PatchloomError(
                f"Preprocessing has {len(recorded.mean)} channels, but the network has {origin.in_chans}."
            )
        # mean and std have one value per channel: with others they do not apply.
        if model.config.in_chans == origin.in_chans:
            model.preprocessing = replace(recorded, img_size=model.config.img_size)
    if metadata.get("class_names") and model.config.num_classes == origin.num_classes:
        model.class_names = check_class_names(metadata["class_names"], origin.num_classes)
        model.label_column = metadata.get("label_column")
