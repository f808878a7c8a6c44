"""Weights alone: our own layout, timm's, the official repository's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.exporting.formats import Request, Runner
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig
from patchloom.weights.files import METADATA_KEY, read, write
from patchloom.weights.layouts import from_ours, written_config
from patchloom.weights.load import load
from patchloom.weights.save import describe


class WeightsFile:
    """A state dict with what describes it; of timm's layout, timm's own network runs it in the check."""

    def __init__(self, request: Request, layout: str) -> None:
        self.network, self.layout = request.network, layout
        tensors = from_ours(self.network.state_dict(), self.network.config, layout)
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self.in_timm = timm_network(self.network.config) if layout == "timm" else None

    def write(self, path: Path, found: dict[str, Any]) -> None:
        about = {**describe(self.network, self.layout), "export": found}
        if path.suffix == ".pth":
            torch.save({"model": self.tensors, METADATA_KEY: json.dumps(about)}, path)
        else:
            write(path, self.tensors, about)

    def open(self, path: Path) -> Runner:
        module = load(path) if self.in_timm is None else self._filled(self.in_timm, path)

        def run(images: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return module(torch.from_numpy(images)).numpy()

        return run

    def _filled(self, module: nn.Module, path: Path) -> nn.Module:
        try:
            module.load_state_dict(read(path).tensors)
        except RuntimeError as error:
            raise PatchloomError(
                f"{self.network.config.name} with these options has no counterpart in timm: "
                f"{str(error).splitlines()[-1].strip()} --to safetensors takes every network."
            ) from error
        return module.eval()


def timm_network(config: Any) -> nn.Module:
    """timm's own network of this shape, with fresh weights."""
    timm = import_timm()
    options: dict[str, Any] = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "num_classes": config.num_classes,
        "embed_dim": config.dim,
        "mlp_ratio": config.mlp_ratio,
    }
    if isinstance(config, ResmlpConfig):
        mixer = timm.models.mlp_mixer
        return mixer.MlpMixer(**options, num_blocks=config.depth, block_layer=mixer.ResBlock, norm_layer=mixer.Affine)
    options |= {"depth": config.depth, "num_heads": config.heads}
    if config.aggregation == "class_attention":
        return timm.create_model("cait_xxs24_224", **options, depth_token_only=config.class_depth)
    options["init_values"] = 1e-5 if config.scale == "layerscale" else None
    if config.distilled:
        return timm.create_model("deit_tiny_distilled_patch16_224", **options)
    written = written_config(config, "timm")
    assert isinstance(written, VitConfig)
    options["no_embed_class"] = written.position_prefix == 0
    if config.branches > 1:
        block = timm.models.vision_transformer.ParallelThingsBlock
        options["block_fn"] = partial(block, num_parallel=config.branches)
    return timm.create_model("vit_tiny_patch16_224", **options)


def make(request: Request, to: str) -> WeightsFile:
    return WeightsFile(request, "patchloom" if to == "safetensors" else to)
