"""Counterparts in timm: the timm network that a patchloom config describes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from patchloom.compat import import_timm
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig
from patchloom.weights.layouts import written_config


def timm_network(config: Any) -> nn.Module:
    """timm's network with the architecture of `config`, with random weights."""
    timm = import_timm()
    options: dict[str, Any] = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "num_classes": 0 if config.headless else config.num_classes,
        "embed_dim": config.dim,
        "mlp_ratio": config.mlp_ratio,
    }
    if isinstance(config, ResmlpConfig):
        mixer = timm.models.mlp_mixer
        return mixer.MlpMixer(**options, num_blocks=config.depth, block_layer=mixer.ResBlock, norm_layer=mixer.Affine)
    options |= {"depth": config.depth, "num_heads": config.heads}
    if config.aggregation == "class_attention":
        # Any registered CaiT will do: the options replace all of its sizes.
        return timm.create_model("cait_xxs24_224", **options, depth_token_only=config.class_depth)
    options["init_values"] = 1e-5 if config.scale == "layerscale" else None
    if config.distilled:
        return timm.create_model("deit_tiny_distilled_patch16_224", **options)
    written = written_config(config, "timm")
    assert isinstance(written, VitConfig)
    # timm stores positions of the patches only if no_embed_class is set
    options["no_embed_class"] = written.position_prefix == 0
    if config.branches > 1:
        block = timm.models.vision_transformer.ParallelThingsBlock
        options["block_fn"] = partial(block, num_parallel=config.branches)
    return timm.create_model("vit_tiny_patch16_224", **options)
