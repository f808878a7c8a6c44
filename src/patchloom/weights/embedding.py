"""Weights of an `EmbeddingNetwork`: a trunk of any kind without its head, a projector, perhaps a classifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.class_names import check_class_names
from patchloom.models.config import as_size
from patchloom.models.embedding import EmbeddingConfig, EmbeddingNetwork
from patchloom.models.foreign import ForeignNetwork
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import build, config_from_json
from patchloom.weights.files import Checkpoint
from patchloom.weights.matching import fit_sizes, match_tensors
from patchloom.weights.report import LoadReport
from patchloom.weights.shape import shape_of

_TRUNK = "trunk."
_FREE_HINTS = ("drop_path", "drop_path_decay", "dropout")  # they do not change what the trunk computes


def describes_embedding(checkpoint: Checkpoint) -> bool:
    """Whether a file of ours holds an `EmbeddingNetwork`."""
    config = checkpoint.metadata.get("config")
    return isinstance(config, Mapping) and config.get("architecture") == EmbeddingConfig.architecture


@torch.inference_mode(False)  # what is built under inference_mode could never be trained
def restore(
    checkpoint: Checkpoint, img_size: Any, num_classes: int | None, in_chans: int | None, strict: bool, **hints: Any
) -> EmbeddingNetwork:
    """The network that a file describes, in eval mode; another image size resizes what depends on it in the trunk.

    Raises PatchloomError for other channels and for hints that contradict the file.
    """
    origin = config_from_json(checkpoint.metadata["config"])
    assert isinstance(origin, EmbeddingConfig)
    if wrong := [name for name in hints if name not in _FREE_HINTS]:
        raise PatchloomError(f"{checkpoint.label} contains the config of its trunk: {wrong[0]} cannot be changed.")
    if in_chans not in (None, origin.in_chans):
        raise PatchloomError(
            f"{checkpoint.label} is for {origin.in_chans} channels: in_chans={in_chans} cannot be set."
        )
    origin = origin.replace(trunk=origin.trunk.replace(**hints)) if hints else origin
    config = origin if img_size is None or _has_timm_trunk(origin) else origin.replace(img_size=as_size(img_size))
    shape_of(origin, checkpoint.label, len(checkpoint.tensors) if strict else None)  # refuses what cannot be built
    model: Any = build(config)
    weights = checkpoint.metadata.get("weights")
    report = LoadReport(checkpoint.label, "patchloom", config.name, weights, notes=checkpoint.notes)
    state = _fitted(checkpoint.tensors, origin, model, report)
    match_tensors(state, model, report, strict)
    own = model.state_dict()
    with torch.no_grad():
        for name in report.loaded:
            own[name].copy_(state[name])
    _set_metadata(checkpoint.metadata, model)
    if isinstance(model.trunk, ForeignNetwork) and img_size is not None:
        model.trunk.set_image_size(as_size(img_size))
        model.config = model.config.replace(trunk=model.trunk.config)
    if num_classes is not None and num_classes != model.config.num_classes:
        model.reset_head(num_classes)
    model.load_report = report
    return model.eval()


def _has_timm_trunk(config: EmbeddingConfig) -> bool:
    return config.trunk.to_json()["architecture"] == "timm"


def _fitted(
    tensors: Mapping[str, Tensor], origin: EmbeddingConfig, model: EmbeddingNetwork, report: LoadReport
) -> dict[str, Tensor]:
    """The tensors of a file, those of the trunk resized to the grid of the model."""
    if not isinstance(model.trunk, PatchNetwork):
        return dict(tensors)
    trunk = {name.removeprefix(_TRUNK): tensor for name, tensor in tensors.items() if name.startswith(_TRUNK)}
    fit_sizes(trunk, origin.trunk, model.trunk, report)  # type: ignore[arg-type]
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(_TRUNK)}
    return {**others, **{f"{_TRUNK}{name}": tensor for name, tensor in trunk.items()}}


def _set_metadata(metadata: Mapping[str, Any], model: EmbeddingNetwork) -> None:
    if "preprocessing" in metadata:
        recorded = Preprocessing.from_json(metadata["preprocessing"])
        model.preprocessing = dataclasses.replace(recorded, img_size=model.config.img_size)
    if metadata.get("class_names"):
        model.class_names = check_class_names(metadata["class_names"], model.config.num_classes)
    model.label_column = metadata.get("label_column")
