"""Parameters, multiply-accumulates and activations in closed form, from a config alone: nothing is built or run.

Counted as the papers do, one image: every Linear and convolution (head and talking-heads mixing included) and the two
products of attention. Not counted: biases, norms, softmax, GELU, scales, additions, averages. `activations` are the
elements that those same operators put out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from patchloom.layers.mixing import SQUEEZE
from patchloom.layers.residual import Gate
from patchloom.layers.stems import stem_strides
from patchloom.models.config import Config, ImageSize, PatchConfig, as_size
from patchloom.models.convnet import ConvNetConfig, trunk_complexity
from patchloom.models.embedding import EmbeddingConfig
from patchloom.models.foreign import ForeignConfig, count_foreign
from patchloom.models.network import unwrapped
from patchloom.models.patchconvnet import PatchConvNetConfig, PoolConfig
from patchloom.models.registry import find_config
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig


@dataclass(frozen=True)
class Complexity:
    """Costs add up (`+`) and repeat (`depth * block`)."""

    params: int = 0
    macs: int = 0
    activations: int = 0

    def __add__(self, other: Complexity) -> Complexity:
        return Complexity(self.params + other.params, self.macs + other.macs, self.activations + other.activations)

    def __rmul__(self, times: int) -> Complexity:
        return Complexity(times * self.params, times * self.macs, times * self.activations)


def complexity(model: nn.Module | Config | str, img_size: ImageSize | None = None) -> Complexity:
    """The cost of a model, a config or a name, for one image of `img_size` (the model's own by default)."""
    config: Any = find_config(model) if isinstance(model, str) else model
    if not isinstance(config, Config):
        # A network's own config, so that a changed head or image size is counted.
        config = unwrapped(model).config
    if img_size is not None:
        config = config.replace(img_size=as_size(img_size))
    return _COUNT[type(config)](config)


def _vit(config: VitConfig) -> Complexity:
    dim, hidden, prefix = config.dim, int(config.dim * config.mlp_ratio), config.prefix_tokens
    fixup = 2 if config.scale_form == "published" else 1
    # Parameters of each residual scale: one per channel for LayerScale, one scalar for the others.
    scale = {"layerscale": dim, "epsilon": 1, "rezero": 1, "skipinit": 1, "fixup": fixup}.get(config.scale, 0)
    scale += config.scale_scalar
    post = config.norm_position == "post"
    norm = vector(0 if config.scale_form == "published" or post else 2 * dim)  # of a branch
    closing = vector(2 * dim if post else 0)  # of a residual

    def block(tokens: int) -> Complexity:
        gate = linear(dim, dim, tokens) if config.scale in Gate.LEARNED else Complexity()
        branch = self_attention(config, tokens) + ffn(dim, hidden, tokens) + 2 * (norm + vector(scale))
        return config.branches * branch + 2 * (gate + closing)

    patches, joined = config.patches, config.depth
    if config.aggregation == "class_token":
        joined = config.class_token_at
    # Blocks before `joined` see the patches only, those from it on the prefix tokens too.
    trunk = joined * block(patches) + (config.depth - joined) * block(patches + prefix)
    pool = Complexity()
    if config.aggregation == "class_attention":
        # Class-attention has queries for the prefix tokens only, so its cost is linear in the patches.
        keys = patches + prefix * config.class_in_keys
        scales = vector(scale if config.class_scale else 0)
        attention = class_attention(dim, config.heads, prefix, keys)
        pool = config.class_depth * (attention + ffn(dim, hidden, prefix) + 2 * (vector(2 * dim) + scales))
    positions = vector((config.position_prefix + patches) * dim)
    tokens = vector(prefix * dim)
    heads = (1 + config.distilled) * _head(config)
    return _stem(config, config.stem_norm) + positions + tokens + trunk + pool + vector(0 if post else 2 * dim) + heads


def _resmlp(config: ResmlpConfig) -> Complexity:
    dim, patches = config.dim, config.patches
    around = vector((3 + (config.post == "affine")) * dim)  # norm and scale of a residual
    feed = int(dim * config.mlp_ratio)
    mixing = {
        "none": Complexity(),
        "linear": around + linear(patches, patches, dim),
        "mlp": around + ffn(patches, 4 * patches, dim),
        "conv": around + conv(dim, dim, 3, config.grid),
        "depthwise": around + conv(dim, dim, 3, config.grid, groups=dim),
        "separable": around + conv(dim, dim, 3, config.grid, groups=dim) + linear(dim, dim, patches),
    }[config.mixing]
    trunk = config.depth * (mixing + around + ffn(dim, feed, patches))
    pool = Complexity()
    if config.aggregation == "class_mlp":
        # The mixing row reads the class token and all patches, and has one output.
        pool = vector(dim) + config.class_depth * (linear(1 + patches, 1, dim) + ffn(dim, feed) + 2 * around)
    positions = vector(patches * dim if config.positions == "patches" else 0)
    return _stem(config) + positions + trunk + pool + vector(2 * dim) + _head(config)


def _patchconvnet(config: PatchConvNetConfig) -> Complexity:
    dim, patches = config.dim, config.patches
    reduced = round(dim * SQUEEZE)
    branch = 2 * linear(dim, dim, patches) + conv(dim, dim, 3, config.grid, groups=dim)
    squeeze = linear(dim, reduced) + linear(reduced, dim)
    return _stem(config) + config.depth * (vector(3 * dim) + branch + squeeze) + _pooled_head(config)


def _convnet(config: ConvNetConfig) -> Complexity:
    return Complexity(*trunk_complexity(config)) + _pooled_head(config)


def _foreign(config: ForeignConfig) -> Complexity:
    return Complexity(*count_foreign(config))


def _embedding(config: EmbeddingConfig) -> Complexity:
    heads = 0 if config.trunk.headless else 1 + getattr(config.trunk, "distilled", False)
    total = complexity(config.trunk) + (-heads) * linear(config.trunk_dim, config.trunk.num_classes)
    if config.projector == "fc":
        total += linear(config.trunk_dim, config.dim)
    elif config.projector == "mlp":
        norm = vector(2 * config.hidden)
        total += linear(config.trunk_dim, config.hidden) + norm + linear(config.hidden, config.dim)
    return total + linear(config.trunk_dim, config.num_classes) if config.classifier else total


def _pooled_head(config: PoolConfig) -> Complexity:
    """The pooling stage, the final norm and the head."""
    dim, queries = config.dim, config.prefix_tokens
    head = vector(2 * dim) + _head(config)
    if config.aggregation == "average":
        return head
    keys = config.patches + (queries if config.queries == "one" else 0)
    attention = class_attention(dim, config.heads, queries, keys)
    return vector(queries * dim) + attention + ffn(dim, int(dim * config.mlp_ratio), queries) + vector(6 * dim) + head


def _head(config: PatchConfig) -> Complexity:
    """One Linear, one vector per class (at the same cost), an MLP with BatchNorm, or nothing."""
    if config.headless:
        return Complexity()
    dim = config.dim
    hidden = linear(dim, dim) + vector(2 * dim) if config.head == "mlp" else Complexity()
    return hidden + linear(dim, config.num_classes)


def _stem(config: PatchConfig, norm: str = "none") -> Complexity:
    kind, dim, patch = getattr(config, "stem", "linear"), config.dim, config.patch_size
    if kind.startswith("linear"):
        return conv(config.in_chans, dim, patch, config.grid) + vector(2 * dim if kind == "linear_norm" else 0)
    strides = stem_strides(kind, patch)
    total, (height, width), inputs = Complexity(), config.img_size, config.in_chans
    for i, stride in enumerate(strides):
        left = len(strides) - 1 - i
        outputs = dim if not left else dim // 4 if kind == "hmlp" else dim // 2**left
        height, width = height // stride, width // stride
        kernel = stride if kind == "hmlp" else 3
        total += conv(inputs, outputs, kernel, (height, width), bias=kind == "hmlp")
        total += vector(2 * outputs if norm != "none" else 0)
        inputs = outputs
    return total


def vector(count: int) -> Complexity:
    """Parameters that multiply nothing that is counted."""
    return Complexity(params=count)


def linear(inputs: int, outputs: int, tokens: int = 1) -> Complexity:
    return Complexity((inputs + 1) * outputs, inputs * outputs * tokens, outputs * tokens)


def conv(
    inputs: int, outputs: int, kernel: int, grid: tuple[int, int], groups: int = 1, bias: bool = True
) -> Complexity:
    weights, positions = inputs // groups * outputs * kernel**2, grid[0] * grid[1]
    return Complexity(weights + outputs * bias, weights * positions, outputs * positions)


def ffn(dim: int, hidden: int, tokens: int = 1) -> Complexity:
    return linear(dim, hidden, tokens) + linear(hidden, dim, tokens)


def product(heads: int, dim: int, queries: int, keys: int) -> Complexity:
    """q k^T and the map times v."""
    return Complexity(macs=2 * queries * keys * dim, activations=heads * queries * keys + queries * dim)


def self_attention(config: VitConfig, tokens: int) -> Complexity:
    dim, heads = config.dim, config.heads
    mixing = 2 * linear(heads, heads, tokens**2) if config.talking_heads else Complexity()
    return linear(dim, 3 * dim, tokens) + linear(dim, dim, tokens) + product(heads, dim, tokens, tokens) + mixing


def class_attention(dim: int, heads: int, queries: int, keys: int) -> Complexity:
    projections = 2 * linear(dim, dim, queries) + 2 * linear(dim, dim, keys)
    return projections + product(heads, dim, queries, keys)


_COUNT: dict[type, Callable[..., Complexity]] = {
    VitConfig: _vit,
    ResmlpConfig: _resmlp,
    PatchConvNetConfig: _patchconvnet,
    ConvNetConfig: _convnet,
    ForeignConfig: _foreign,
    EmbeddingConfig: _embedding,
}
