"""Weights of timm's networks: published ones, files in timm's layout, and our own files of such networks.

Names in timm's layout are those of timm; in ours they have the prefix of `ForeignNetwork`, `network.`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.models.class_names import check_class_names
from patchloom.models.config import as_size
from patchloom.models.foreign import TIMM, ForeignConfig, ForeignNetwork, foreign_config, split_source
from patchloom.models.imagenet import CLASSES, imagenet_names
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import build, config_from_json
from patchloom.models.roles import parameter_roles
from patchloom.text import some
from patchloom.weights.files import Checkpoint, read
from patchloom.weights.hub import FILES, download
from patchloom.weights.report import LoadReport
from patchloom.weights.shape import shape_of

_PREFIX = "network."
_COUNTER = ".num_batches_tracked"  # of BatchNorm, which older files lack
_FREE_HINTS = ("drop_path", "dropout")  # what may be changed of a network whose file describes it


def load_timm(
    source: str, img_size: Any = None, num_classes: int | None = None, in_chans: int | None = None, **options: Any
) -> ForeignNetwork:
    """timm:NAME with the weights that timm publishes, timm:NAME:FILE with those of a local file; in eval mode.

    `options` are those of the network. Raises PatchloomError for an unknown name, a file that does not fit, and where
    published weights cannot be downloaded.
    """
    name, file = split_source(source)
    if file:
        checkpoint = read(Path(file))
        if describes_timm(checkpoint):
            return restore(checkpoint, img_size, num_classes, in_chans, True, **options)
        tensors: Mapping[str, Tensor] = checkpoint.tensors
    else:
        tensors = _published(source, name)
    config = foreign_config(f"{TIMM}{name}", name).replace(**_classes_of(tensors, name), **options)
    named = {f"{_PREFIX}{key}": tensor for key, tensor in tensors.items()}
    model = _restore(Checkpoint(source, named), config, img_size, num_classes, in_chans, True)
    # timm's classifiers with 1000 outputs are in ImageNet's order.
    if model.config.num_classes == config.num_classes == CLASSES:
        model.class_names = check_class_names(imagenet_names(), CLASSES)
    return model


def _published(source: str, name: str) -> Mapping[str, Tensor]:
    timm = import_timm()
    cfg, overlay = timm.get_pretrained_cfg(name), None
    if cfg is not None and cfg.hf_hub_id:
        names = (cfg.hf_hub_filename,) if cfg.hf_hub_filename else FILES
        # Our download fails within seconds where there is no network; timm's retries for half a minute.
        overlay = {"file": str(download(cfg.hf_hub_id, names, source)), "custom_load": False}
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).state_dict()
    except Exception as error:  # whatever the hub makes timm raise
        raise PatchloomError(
            f"The published weights of {source} cannot be loaded: {type(error).__name__}: {error}. "
            f"A file of weights is given as {TIMM}{name}:FILE."
        ) from error


def _classes_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, int]:
    """How many classes a file of timm's layout has, where its classifier is found."""
    names = import_timm().get_pretrained_cfg(name).classifier
    weight = tensors.get(f"{names if isinstance(names, str) else names[0]}.weight")
    return {} if weight is None else {"num_classes": len(weight)}


def describes_timm(checkpoint: Checkpoint) -> bool:
    """Whether a file of ours holds a network of timm."""
    config = checkpoint.metadata.get("config")
    return isinstance(config, Mapping) and config.get("architecture") == ForeignConfig.architecture


def restore(
    checkpoint: Checkpoint, img_size: Any, num_classes: int | None, in_chans: int | None, strict: bool, **hints: Any
) -> ForeignNetwork:
    """The network that a file of ours describes, in eval mode, with its preprocessing and class names.

    Raises:
        PatchloomError: tensors do not fit, or a hint contradicts the file.
    """
    config = config_from_json(checkpoint.metadata["config"])
    assert isinstance(config, ForeignConfig)
    if wrong := [name for name in hints if name not in _FREE_HINTS]:
        raise PatchloomError(f"{checkpoint.label} contains the config of {config.name}: {wrong[0]} cannot be changed.")
    bare = checkpoint.metadata.get("layout") == "timm"
    named = {f"{_PREFIX}{key}" if bare else key: tensor for key, tensor in checkpoint.tensors.items()}
    described = dataclasses.replace(checkpoint, tensors=named)
    return _restore(described, config.replace(**hints), img_size, num_classes, in_chans, strict)


@torch.inference_mode(False)  # what is built under inference_mode could never be trained
def _restore(
    checkpoint: Checkpoint,
    config: ForeignConfig,
    img_size: Any,
    num_classes: int | None,
    in_chans: int | None,
    strict: bool,
) -> ForeignNetwork:
    if in_chans not in (None, config.in_chans):
        raise PatchloomError(
            f"The weights of {config.name} are for {config.in_chans} channels, and only our own networks adapt to "
            f"others: in_chans={in_chans} needs create_model."
        )
    report = LoadReport(
        checkpoint.label, "timm", config.name, checkpoint.metadata.get("weights"), notes=checkpoint.notes
    )
    shape = shape_of(config, checkpoint.label, len(checkpoint.tensors) if strict else None)
    _check_shapes(shape, checkpoint.tensors, report, strict)
    model = build(config)
    assert isinstance(model, ForeignNetwork)
    _fill(model, checkpoint.tensors, report, strict)
    metadata = checkpoint.metadata
    if "preprocessing" in metadata:
        model.preprocessing = Preprocessing.from_json(metadata["preprocessing"])
    if metadata.get("class_names"):
        model.class_names = check_class_names(metadata["class_names"], config.num_classes)
        model.label_column = metadata.get("label_column")
    if num_classes is not None and num_classes != config.num_classes:
        # After loading, so that a head of the old size does not fail the strict check.
        model.reset_head(num_classes)
        heads = [name for name, role in parameter_roles(model).items() if role == "head"]
        why = f"{config.num_classes} classes in the file, {num_classes} asked for"
        report.reinitialised = dict.fromkeys(heads, why)
        report.loaded = [name for name in report.loaded if name not in heads]
    if img_size is not None:
        model.set_image_size(as_size(img_size))
    model.load_report = report
    return model.eval()


def _check_shapes(shape: ForeignNetwork, tensors: Mapping[str, Tensor], report: LoadReport, strict: bool) -> None:
    """Raise PatchloomError if the tensors of a file contradict the network on the meta device that it describes."""
    own = shape.state_dict()
    wrong = [
        f"{name.removeprefix(_PREFIX)} needs {_sizes(own[name])}, not {_sizes(tensor)}"
        for name, tensor in tensors.items()
        if name in own and own[name].shape != tensor.shape
    ]
    if wrong:
        raise PatchloomError(f"{report.source} does not fit {report.model}: {some(wrong, 3)}")
    report.missing = [name for name in own if name not in tensors and not name.endswith(_COUNTER)]
    report.unused = [name for name in tensors if name not in own]
    if strict:
        _check_complete(report)


def _sizes(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def _check_complete(report: LoadReport) -> None:
    if names := [*report.missing, *report.unused]:
        raise PatchloomError(
            f"{report.source} does not fit {report.model}: {len(report.missing)} tensors are missing and "
            f"{len(report.unused)} are unknown, such as {names[0].removeprefix(_PREFIX)}. strict=False loads the rest."
        )


def _fill(model: ForeignNetwork, tensors: Mapping[str, Tensor], report: LoadReport, strict: bool) -> None:
    """Copy the tensors that fit; refuse or note the rest."""
    try:
        keys = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # other shapes
        reason = " ".join(str(error).split())
        raise PatchloomError(f"{report.source} does not fit {model.config.name}: {reason[:300]}") from error
    report.missing, report.unused = list(keys.missing_keys), list(keys.unexpected_keys)
    report.loaded = [name for name in tensors if name not in report.unused]
    if strict:
        _check_complete(report)


def tensors_of(network: ForeignNetwork, layout: str) -> dict[str, Tensor]:
    """The tensors of a network of timm under our names or timm's."""
    if layout not in ("patchloom", "timm"):
        raise PatchloomError(f"{network.config.name} can be saved in the layouts patchloom and timm, not {layout!r}.")
    inner = network if layout == "patchloom" else network.network
    return dict(inner.state_dict())
