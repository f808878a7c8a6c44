"""ResMLP (thesis ch. 4): patches exchange information through one Linear per block, channels through an FFN.

z = x + gamma_1 * (A Aff(x)^T)^T       A is patches x patches
y = z + gamma_2 * FFN(Aff(z))

The text has an Aff with a shift after each branch (Eq. 4.2, 4.3); the authors' code has the factor alone, as here.
`post="affine"` is the text's form: gamma * branch + beta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from patchloom.layers.ffn import FFN
from patchloom.layers.mixing import ClassMLP, CrossPatchFFN, CrossPatchLinear, GridConv
from patchloom.layers.norms import make_norm
from patchloom.layers.residual import Block, Branch, Residual
from patchloom.layers.scales import AffineScale, LayerScale, layerscale_value
from patchloom.layers.stems import make_stem
from patchloom.models.config import PatchConfig
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.registry import Paper, register, register_architecture


@dataclass(frozen=True, kw_only=True)
class ResmlpConfig(PatchConfig):
    """The choices of a ResMLP (thesis Table 4.3)."""

    architecture: ClassVar[str] = "resmlp"

    mlp_ratio: float = 4.0
    norm: Literal["affine", "layer", "batch"] = "affine"  # batch: 4.3.4
    post: Literal["scale", "affine"] = "scale"  # after a branch: gamma * y, or Aff with its shift (Eq. 4.2, 4.3)
    activation: Literal["gelu", "relu", "silu", "hardswish"] = "gelu"  # of every FFN, across patches too (4.3.4)
    positions: Literal["none", "patches"] = "none"  # learned, added to the patches (4.3.4)
    mixing: Literal["none", "linear", "mlp", "conv", "depthwise", "separable"] = "linear"
    aggregation: Literal["average", "class_mlp"] = "average"
    class_depth: int = 2  # blocks of the class-MLP stage
    scale_value: float | None = None  # None: by the rule of `scale_start`

    @property
    def scale_start(self) -> float:
        """LayerScale's initial value: `scale_value` if set. Otherwise 1e-6 for networks wider than S (384), as the
        authors' code has it for B24/8 where CaiT's rule by depth would give 1e-5, and that rule up to this width."""
        if self.scale_value is not None:
            return self.scale_value
        return 1e-6 if self.dim > 384 else layerscale_value(self.depth)

    @property
    def prefix_tokens(self) -> int:
        return int(self.aggregation == "class_mlp")


class ResMLP(PatchNetwork):
    """See the module's docstring; `config` decides every choice."""

    config: ResmlpConfig

    def __init__(self, config: ResmlpConfig) -> None:
        class_mlp = config.aggregation == "class_mlp"
        super().__init__(
            config,
            stem=make_stem("linear", config.in_chans, config.dim, config.patch_size),
            position_prefix=0 if config.positions == "patches" else None,
            class_tokens=int(class_mlp),
            blocks=[_trunk_block(config) for _ in range(config.depth)],
            pool=[_class_block(config) for _ in range(config.class_depth if class_mlp else 0)],
            norm=make_norm(config.norm, config.dim),
            fixed_grid=True,
            keep_refused="its cross-patch layers have one weight for every pair of patches",
        )


def _trunk_block(config: ResmlpConfig) -> Block:
    mixing = _mixing(config)
    return Block(
        None if mixing is None else _residual(config, mixing, config.drop_path), _ffn(config, config.drop_path)
    )


def _class_block(config: ResmlpConfig) -> Block:
    return Block(_residual(config, ClassMLP(1 + config.patches)), _ffn(config))


def _ffn(config: ResmlpConfig, drop_path: float = 0.0) -> Residual:
    return _residual(config, FFN(config.dim, int(config.dim * config.mlp_ratio), config.activation), drop_path)


def _residual(config: ResmlpConfig, layer: nn.Module, drop_path: float = 0.0) -> Residual:
    scale = (AffineScale if config.post == "affine" else LayerScale)(config.dim, config.scale_start)
    return Residual([Branch(make_norm(config.norm, config.dim), layer, scale, drop_path)])


def _mixing(config: ResmlpConfig) -> nn.Module | None:
    if config.mixing == "none":
        return None
    if config.mixing == "linear":
        return CrossPatchLinear(config.patches)
    if config.mixing == "mlp":
        return CrossPatchFFN(config.patches, activation=config.activation)
    return GridConv(config.dim, config.grid, config.mixing)


_MODELS = {  # dim, depth, patch size
    "resmlp_s12": ((384, 12, 16), Paper("ResMLP Table 4.3", 15.4, 3.0)),
    "resmlp_s24": ((384, 24, 16), Paper("ResMLP Table 4.3", 30.0, 6.0)),
    "resmlp_s36": ((384, 36, 16), Paper("published models", 44.7, None, "the README prints B24/16's 116M, 23B")),
    "resmlp_b24": ((768, 24, 16), Paper("ResMLP Table 4.3", 115.7, 23.0)),
    "resmlp_s12_p14": ((384, 12, 14), Paper("ResMLP Table 4.3", 15.6, 4.0)),
    "resmlp_s12_p8": ((384, 12, 8), Paper("ResMLP Table 4.3", 22.1, 14.0)),
    "resmlp_b24_p8": ((768, 24, 8), Paper("ResMLP Table 4.3", 129.1, 100.2)),
}

register_architecture(ResmlpConfig, ResMLP)
for _name, ((_dim, _depth, _patch), _paper) in _MODELS.items():
    register(ResmlpConfig(name=_name, family="resmlp", dim=_dim, depth=_depth, patch_size=_patch), _paper)
