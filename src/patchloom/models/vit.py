"""Vision transformers: one network for DeiT, DeiT III, parallel ViTs, CaiT and the depth study between them.

x = stem(image) + positions
x = x + drop(scale(SA(norm(x))))       P such branches summed in a parallel ViT
x = x + drop(scale(FFN(norm(x))))      likewise
logits = head(norm(aggregate(x)))

Post-norm instead: x = norm(x + drop(scale(SA(x)))), likewise the FFN, and no norm before the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.layers.attention import ClassAttention, SelfAttention, TalkingHeadsAttention
from patchloom.layers.ffn import FFN
from patchloom.layers.init import init_fixup, init_t_fixup
from patchloom.layers.norms import make_norm
from patchloom.layers.residual import Block, Branch, Gate, Residual
from patchloom.layers.scales import FixupScale, LayerScale, ScalarScale, Scale, layerscale_value
from patchloom.layers.stems import make_stem
from patchloom.models.config import PatchConfig, check_heads, check_rate
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.registry import register_architecture

ScaleName = Literal[
    "none", "layerscale", "epsilon", "rezero", "skipinit", "fixup", "t-fixup",
    "constant", "exclusive_gate", "shortcut_gate", "linear_shortcut", "dropout_shortcut",
]  # fmt: skip


_UNNORMED = ("rezero", "skipinit", "fixup", "t-fixup")  # published without pre-norm
_WITH_PARAMETERS = ("layerscale", "epsilon", "rezero", "skipinit", "fixup")


@dataclass(frozen=True, kw_only=True)
class VitConfig(PatchConfig):
    """The choices of a vision transformer."""

    architecture: ClassVar[str] = "vit"

    heads: int = 6
    branches: int = 1  # P parallel attentions, then P parallel FFNs, in each block
    mlp_ratio: float = 4.0
    stem: Literal["linear", "linear_norm", "linear_gelu", "hmlp", "conv"] = "linear"  # "Three things", Table 7
    stem_norm: Literal["batch", "layer"] = "batch"  # of the linear_norm, hmlp and conv stems
    positions: Literal["all", "patches"] = "patches"  # "all": the prefix tokens have one too (DeiT)
    norm: Literal["layer"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"  # post: after each sum, which replaces the final norm too
    talking_heads: bool = False
    scale: ScaleName = "none"
    scale_value: float | None = None  # start; None: by scale_rule (layerscale, epsilon), 0 (rezero, skipinit) or 1
    scale_rule: Literal["depth", "fixed"] = "depth"  # start: layerscale_value(depth), or 1e-4 (DeiT III)
    scale_init: Literal["constant", "zero", "uniform"] = "constant"
    scale_form: Literal["amended", "published"] = "amended"  # amended: with pre-norm (thesis Table 3.11)
    scale_scalar: bool = False  # T-Fixup with a learned scalar per branch that starts at 1 (amended, thesis Table 3.11)
    scale_trainable: bool = True
    aggregation: Literal["class_token", "average", "class_attention"] = "class_token"
    class_token_at: int = field(
        default=0, metadata={"least": 0}
    )  # the block before which the class token joins (thesis Table 3.13)
    class_depth: int = 2  # blocks of the class-attention stage
    class_in_keys: bool = True  # whether the class token is among the keys of that stage
    class_scale: bool = True  # whether that stage scales its residuals like the trunk
    distilled: bool = False
    drop_path_decay: Literal["uniform", "linear"] = "uniform"
    dropout: float = 0.0  # of the embedded tokens, after each attention's projection, twice in each FFN (Table 3.8)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)
        check_rate(self.name, "dropout", self.dropout)
        if self.distilled and self.aggregation == "average":
            raise PatchloomError(f"{self.name} averages its patches: there is no place for a distillation token.")
        if self.class_token_at and (self.aggregation != "class_token" or self.class_token_at >= self.depth):
            raise PatchloomError(
                f"class_token_at={self.class_token_at} needs aggregation='class_token' and more than "
                f"{self.class_token_at} blocks; {self.name} has {self.aggregation!r} and {self.depth}."
            )
        learned = (*_WITH_PARAMETERS, "t-fixup") if self.scale_scalar else _WITH_PARAMETERS
        for option, needed, given in (
            ("scale_scalar", ("t-fixup",), self.scale_scalar),
            ("scale_init", ("layerscale",), self.scale_init != "constant"),
            ("scale_form", _UNNORMED, self.scale_form == "published"),
            ("scale_value", learned, self.scale_value is not None),
            ("scale_trainable", learned, not self.scale_trainable),
        ):
            if given and self.scale not in needed:
                also = "" if self.scale_scalar else " (or t-fixup with scale_scalar=True)"
                raise PatchloomError(
                    f"{option} of {self.name} needs a scale of {', '.join(needed)}{also * (needed is learned)}, not "
                    f"{self.scale!r}."
                )
        if self.norm_position == "post" and self.scale_form == "published":
            raise PatchloomError(f"norm_position='post' of {self.name} needs norms; scale_form='published' has none.")
        if self.aggregation != "class_attention" and not (self.class_in_keys and self.class_scale):
            raise PatchloomError(
                f"class_in_keys and class_scale of {self.name} need aggregation='class_attention', "
                f"not {self.aggregation!r}."
            )

    @property
    def prefix_tokens(self) -> int:
        return 0 if self.aggregation == "average" else 1 + self.distilled

    @property
    def position_prefix(self) -> int:
        """Prefix tokens with a position: those in the trunk from its first block on, where positions cover "all"."""
        joins_at_once = self.aggregation == "class_token" and self.class_token_at == 0
        return self.prefix_tokens if self.positions == "all" and joins_at_once else 0

    @property
    def scale_start(self) -> float | None:
        if self.scale not in ("layerscale", "epsilon"):
            return None
        if self.scale_init == "zero":
            return 0.0
        # P parallel branches count as P blocks, as for the drop rates
        by_rule = 1e-4 if self.scale_rule == "fixed" else layerscale_value(self.depth * self.branches)
        return by_rule if self.scale_value is None else self.scale_value

    @property
    def drop_path_rates(self) -> list[float]:
        """One rate per block: the same everywhere, or rising linearly from 0 (DeiT)."""
        if self.drop_path_decay == "uniform" or self.depth == 1:
            return [self.drop_path] * self.depth
        return [self.drop_path * i / (self.depth - 1) for i in range(self.depth)]


class VisionTransformer(PatchNetwork):
    """See the module's docstring; `config` decides every choice."""

    config: VitConfig

    def __init__(self, config: VitConfig) -> None:
        staged = config.aggregation == "class_attention"
        super().__init__(
            config,
            stem=make_stem(config.stem, config.in_chans, config.dim, config.patch_size, config.stem_norm),
            position_prefix=config.position_prefix,
            class_tokens=int(config.prefix_tokens > 0),
            distilled=config.distilled,
            join_at=config.class_token_at if config.aggregation == "class_token" else None,
            blocks=[_trunk_block(config, rate) for rate in config.drop_path_rates],
            pool=[_class_block(config) for _ in range(config.class_depth if staged else 0)],
            norm=nn.Identity() if config.norm_position == "post" else make_norm(config.norm, config.dim),
            dropout=config.dropout,
        )

    def init_weights(self) -> None:
        super().init_weights()
        if self.config.scale == "fixup":
            init_fixup(self.blocks, *self.output_heads)
        elif self.config.scale == "t-fixup":
            init_t_fixup(self.blocks)

    def reset_head(self, num_classes: int) -> None:
        super().reset_head(num_classes)
        if self.config.scale == "fixup":
            init_fixup(nn.ModuleList(), *self.output_heads)


def _trunk_block(config: VitConfig, drop_path: float) -> Block:
    attention = TalkingHeadsAttention if config.talking_heads else SelfAttention

    def residual(layer: type[nn.Module], size: int) -> Residual:
        post_norm = _post_norm(config)
        branches = [
            Branch(_norm(config), layer(config.dim, size, dropout=config.dropout), make_scale(config), drop_path)
            for _ in range(config.branches)
        ]
        gate = Gate(config.scale, config.dim) if config.scale in Gate.KINDS else None
        return Residual(branches, gate, post_norm)

    return Block(residual(attention, config.heads), residual(FFN, int(config.dim * config.mlp_ratio)))


def _class_block(config: VitConfig) -> Block:
    """Class-attention, then an FFN on the class token alone (CaiT, ICCV section 3; thesis 3.6.1); no stochastic depth
    and no dropout there, as in the authors' code."""

    def residual(layer: nn.Module) -> Residual:
        scale = make_scale(config) if config.class_scale else None
        norm = nn.Identity() if config.norm_position == "post" else make_norm(config.norm, config.dim)
        return Residual([Branch(norm, layer, scale)], norm=_post_norm(config))

    attention = ClassAttention(config.dim, config.heads, config.class_in_keys)
    return Block(residual(attention), residual(FFN(config.dim, int(config.dim * config.mlp_ratio))))


def _norm(config: VitConfig) -> nn.Module:
    """ReZero, SkipInit, Fixup and T-Fixup were published without pre-norm; CaiT puts it back so that they converge."""
    unnormed = config.scale_form == "published" or config.norm_position == "post"
    return make_norm("none" if unnormed else config.norm, config.dim)


def _post_norm(config: VitConfig) -> nn.Module | None:
    return make_norm(config.norm, config.dim) if config.norm_position == "post" else None


def make_scale(config: VitConfig) -> Scale:
    """The scale of one residual branch."""
    value, trainable = config.scale_value, config.scale_trainable
    if (start := config.scale_start) is not None:
        if config.scale == "epsilon":  # the column "alpha = epsilon" of thesis Table 3.11
            return ScalarScale(start, trainable)
        return LayerScale(config.dim, start, config.scale_init, trainable)
    if config.scale in ("rezero", "skipinit"):
        return ScalarScale(0.0 if value is None else value, trainable)
    if config.scale == "fixup":
        # a norm that follows removes what is added to all channels alike, so Fixup's bias is only in the published form
        kind = FixupScale if config.scale_form == "published" else ScalarScale
        return kind(1.0 if value is None else value, trainable)
    if config.scale_scalar:  # its start is not printed; 1 leaves T-Fixup's own start as it is
        return ScalarScale(1.0 if value is None else value, trainable)
    return Scale()


register_architecture(VitConfig, VisionTransformer)
