"""PatchConvNet (thesis ch. 5): a column of convolutional residual blocks, pooled by attention.

x = x + gamma_1 * conv_branch(norm(x))              depth times, on the grid of patches
c = c + gamma_1 * CA(norm([c, x])); c = c + gamma_2 * FFN(norm(c))
logits = head(norm(c))                              c: one query, or one per class
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.layers.attention import ClassAttention
from patchloom.layers.ffn import FFN
from patchloom.layers.mixing import ConvBranch
from patchloom.layers.norms import make_norm
from patchloom.layers.residual import Block, Branch, Residual
from patchloom.layers.scales import LayerScale
from patchloom.layers.stems import make_stem
from patchloom.models.config import PatchConfig, check_heads
from patchloom.models.fused import FusedNetwork
from patchloom.models.heads import PerClassHead
from patchloom.models.patch_network import PatchNetwork, patch_network
from patchloom.models.registry import Paper, register, register_architecture


@dataclass(frozen=True, kw_only=True)
class PoolConfig(PatchConfig):
    """The choices of attention pooling on top of any trunk."""

    heads: int = 1
    mlp_ratio: float = 3.0  # of the FFN after the pooling attention
    aggregation: Literal["attention", "average"] = "attention"
    queries: Literal["one", "per_class"] = "one"
    scale_value: float | None = None  # None: by the rule of `scale_start`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)
        if self.queries == "per_class" and self.aggregation == "average":
            raise PatchloomError(
                f"{self.name} averages its patches: queries='per_class' needs aggregation='attention'."
            )

    @property
    def scale_start(self) -> float | None:
        """LayerScale's initial value: `scale_value`, or 1e-4; None with an average, which has no pooling stage."""
        if self.aggregation == "average":
            return None
        return 1e-4 if self.scale_value is None else self.scale_value

    @property
    def prefix_tokens(self) -> int:
        if self.aggregation == "average":
            return 0
        return 1 if self.queries == "one" else self.num_classes


@dataclass(frozen=True, kw_only=True)
class PatchConvNetConfig(PoolConfig):
    """The choices of a PatchConvNet (thesis Table 5.7)."""

    architecture: ClassVar[str] = "patchconvnet"

    norm: Literal["layer", "batch"] = "layer"  # of the trunk; the pooling stage has LayerNorm in either case
    stem: Literal["conv", "linear"] = "conv"

    @property
    def scale_start(self) -> float:
        """LayerScale's initial value: `scale_value` if set. Otherwise 1e-4 up to the size of S60 (width 384, 60
        blocks), 1e-6 for deeper or wider networks: the values of the authors' code."""
        if self.scale_value is not None:
            return self.scale_value
        return 1e-4 if self.dim <= _DIMS["s"] and self.depth <= 60 else 1e-6


class PatchConvNet(PatchNetwork):
    """See the module's docstring; `config` decides every choice."""

    config: PatchConvNetConfig

    def __init__(self, config: PatchConvNetConfig) -> None:
        super().__init__(
            config,
            stem=make_stem(config.stem, config.in_chans, config.dim, config.patch_size),
            class_tokens=config.prefix_tokens,
            per_class=config.queries == "per_class",
            blocks=[_trunk_block(config) for _ in range(config.depth)],
            pool=pool_stage(config),
            norm=make_norm("layer", config.dim),
            maps=True,
            keep_refused="its convolutions need the whole map",
        )


def _trunk_block(config: PatchConvNetConfig) -> Block:
    norm, scale = make_norm(config.norm, config.dim), LayerScale(config.dim, config.scale_start)
    return Block(Residual([Branch(norm, ConvBranch(config.dim), scale, config.drop_path)]), None)


def pool_stage(config: PoolConfig) -> list[Block]:
    """The pooling block, or none for an average. A query per class reads the patches only, a single one itself too."""
    if config.aggregation == "average":
        return []

    start = config.scale_start
    assert start is not None

    def residual(layer: nn.Module) -> Residual:
        return Residual([Branch(make_norm("layer", config.dim), layer, LayerScale(config.dim, start))])

    attention = ClassAttention(config.dim, config.heads, in_keys=config.queries == "one", role="pool")
    return [Block(residual(attention), residual(FFN(config.dim, int(config.dim * config.mlp_ratio))))]


@torch.inference_mode(False)
@torch.no_grad()
def per_class_queries(model: nn.Module) -> PatchNetwork:
    """A copy of a network with one query that has one query per class instead (thesis 5.2.1), ready for fine-tuning.

    Every class starts from a copy of the trained query (1, 1, D) -> (1, classes, D) and from its own row of the head.
    The queries of classes read the patches only, so each logit starts as that of the single query would be if it did
    not attend to itself. A network that has a query per class already is copied as it is. For other classes call
    `reset_head` before, not after: it would replace the queries.

    Raises PatchloomError where there is no attention pooling, or a head other than "linear".
    """
    network = copy.deepcopy(patch_network(model))
    config = network.config
    if not isinstance(config, PoolConfig):
        raise PatchloomError(f"{config.name} has no attention pooling, so it cannot have one query per class.")
    if isinstance(network, FusedNetwork):
        raise PatchloomError("A fused copy has folded weights: convert the network that it was made from.")
    if config.queries == "per_class":
        return network
    network.config = config.replace(queries="per_class")
    if not isinstance(network.head, nn.Linear):
        raise PatchloomError(f"{config.name} has head={config.head!r}: one query per class needs head='linear'.")
    token, linear = network.class_token, network.head
    assert token is not None
    copies = token.repeat(1, config.num_classes, 1)
    network.class_token = nn.Parameter(copies, requires_grad=token.requires_grad)
    head = PerClassHead(config.dim, config.num_classes)
    head.weight, head.bias = cast(nn.Parameter, linear.weight), linear.bias
    network.per_class, network.head = True, head
    for attention in network.pool.modules():
        if isinstance(attention, ClassAttention):
            attention.in_keys = False
    return network


_DIMS = {"s": 384, "b": 768, "l": 1024}
_MODELS = {
    "patchconvnet_s20": Paper("PatchConvNet Table 5.8"),
    "patchconvnet_s36": Paper("PatchConvNet Table 5.8"),
    "patchconvnet_s60": Paper("PatchConvNet Table 5.1", 25.2, 4.0),
    "patchconvnet_s120": Paper("PatchConvNet Table 5.1", 47.7, 7.5),
    "patchconvnet_b36": Paper("PatchConvNet Table 5.8"),
    "patchconvnet_b60": Paper("PatchConvNet Table 5.1", 99.4, 15.8),
    "patchconvnet_b120": Paper("PatchConvNet Table 5.1", 188.6, 29.9, "Table 5.2 prints 29.8 billion MACs"),
    "patchconvnet_l60": Paper("PatchConvNet Table 5.2", None, 28.1),
    "patchconvnet_l120": Paper("PatchConvNet Table 5.2", None, 53.0),
}

register_architecture(PatchConvNetConfig, PatchConvNet)
for _name, _paper in _MODELS.items():
    _size, _depth = _name[13], int(_name[14:])
    register(PatchConvNetConfig(name=_name, family="patchconvnet", dim=_DIMS[_size], depth=_depth), _paper)
