"""Options of a network read from its tensors, for each architecture: one function per kind of network.

State dicts are under patchloom's names. Only shapes and names are used, so that tensors need not be in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isqrt, prod
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.config import PatchConfig, as_size
from patchloom.models.patchconvnet import PatchConvNetConfig
from patchloom.models.registry import entries
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig
from patchloom.weights.layouts import State, count

# prefixes of the mixing branch and the FFN branch within a block
_MIX, _FFN = "mixing.branches.0.", "ffn.branches.0."


class Parts:
    """A state dict by parts: `trunk` and `pool` have the tensors of any of their blocks, by name within a block.

    A tensor that only one block lacks is thereby distinguished from a tensor that the network does not have.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.notes: list[str] = []  # assumptions
        self.trunk = self._any_block("blocks")
        self.pool = self._any_block("pool")
        self.depth = count(state, r"blocks\.(\d+)\.")
        # Without pooling layers the option is not used: 2 is the default of the configs.
        self.class_depth = count(state, r"pool\.(\d+)\.") or 2

    def mixes_by(self, *layers: str) -> bool:
        """Whether the mixing branch of any block has one of these layers or tensors."""
        return any(name.startswith(f"{_MIX}fn.{layer}") for name in self.trunk for layer in layers)

    def _any_block(self, stage: str) -> State:
        matches = ((re.fullmatch(rf"{stage}\.\d+\.(.+)", name), tensor) for name, tensor in self.state.items())
        return {match[1]: tensor for match, tensor in matches if match}

    @property
    def classes(self) -> int | None:
        """The number of classes; None if there is no head."""
        heads = (f"{head}.{kind}" for head in ("head", "head_distill") for kind in ("weight", "bias"))
        return next((self.state[name].shape[0] for name in heads if name in self.state), None)

    @property
    def distilled(self) -> bool:
        """Whether there is a distillation token or head."""
        return any(name.startswith(("distill_token", "head_distill.")) for name in self.state)


def find_reader(parts: Parts) -> tuple[type[PatchConfig], Callable[..., dict[str, Any]]]:
    """The config class, determined by the layers that mix patches, and the function that reads its options."""
    if parts.mixes_by("expand", "depthwise", "squeeze_excite"):
        return PatchConvNetConfig, _patchconvnet
    return (VitConfig, _vit) if parts.mixes_by("qkv", "proj") else (ResmlpConfig, _resmlp)


def _vit(parts: Parts, wanted: Any, source: Any, hints: dict[str, Any]) -> dict[str, Any]:
    """Options of DeiT, DeiT III, CaiT and parallel ViTs."""
    dim = _dim(parts)
    stem = _stem(parts.state, dim)
    staged, talking = bool(parts.pool), parts.trunk.get(f"{_MIX}fn.proj_l.bias")
    # average pooling only on request: otherwise a file without a class token is an incomplete file
    aggregation = hints.get("aggregation", "class_attention" if staged else "class_token")
    # Only tokens in the trunk can have positions; CaiT's join later and have none.
    prefix = 1 + parts.distilled if aggregation == "class_token" else 0
    positions = parts.state.get("positions")
    size, position_prefix = _free_size(wanted, source), 0
    if positions is not None:
        size, position_prefix = _positions_size(positions.shape[1], prefix, stem["patch_size"], wanted, source)
    return dict(
        **stem,
        **_common(parts, dim),
        img_size=size,
        heads=talking.shape[0] if talking is not None else _heads(parts, dim, 48 if staged else 64, hints),
        branches=count(parts.state, r"blocks\.\d+\.mixing\.branches\.(\d+)\."),
        talking_heads=parts.mixes_by("proj_l", "proj_w"),
        positions="all" if position_prefix else "patches",
        norm_position="post" if "mixing.norm.weight" in parts.trunk else "pre",
        scale="layerscale" if any(name.endswith("scale.gamma") for name in parts.trunk) else "none",
        aggregation=aggregation,
        class_depth=parts.class_depth,
        class_scale=not staged or any(name.endswith("scale.gamma") for name in parts.pool),
        distilled=parts.distilled,
    )


def _resmlp(parts: Parts, wanted: Any, source: Any, _: dict[str, Any]) -> dict[str, Any]:
    """Options of ResMLP. The number of patches comes from the mixing, the class-MLP or the positions."""
    dim = _dim(parts)
    stem = _stem(parts.state, dim)
    patch = stem["patch_size"]
    mixing, tokens = _mixing(parts.trunk)
    positions = parts.state.get("positions")
    if tokens is None and (row := parts.pool.get(f"{_MIX}fn.weight")) is not None:
        # The row of a class-MLP has one weight per patch, and one for the class token.
        tokens = row.shape[1] - 1
    elif tokens is None and positions is not None:
        tokens = positions.shape[1]
    return dict(
        patch_size=patch,
        in_chans=stem["in_chans"],
        **_common(parts, dim),
        img_size=_free_size(wanted, source) if tokens is None else _positions_size(tokens, 0, patch, wanted, source)[0],
        norm=_norm(parts.trunk),
        post="affine" if any(name.endswith("scale.beta") for name in parts.trunk) else "scale",
        positions="none" if positions is None else "patches",
        mixing=mixing,
        aggregation="class_mlp" if parts.pool else "average",
        class_depth=parts.class_depth,
    )


def _norm(trunk: State) -> str:
    """The norm of the residual branches of a ResMLP."""
    if any(name.endswith("norm.running_mean") for name in trunk):
        return "batch"
    return "affine" if any(name.endswith("norm.alpha") for name in trunk) else "layer"


def _mixing(trunk: State) -> tuple[str, int | None]:
    """The kind of cross-patch layer of a ResMLP, and the number of patches if the layer depends on it."""
    names = {name.removeprefix(f"{_MIX}fn.") for name in trunk if name.startswith(f"{_MIX}fn.")}
    if "bias" in names or "weight" in names:
        return "linear", trunk[f"{_MIX}fn.{'bias' if 'bias' in names else 'weight'}"].shape[0]
    if "fc2.bias" in names:
        return "mlp", trunk[f"{_MIX}fn.fc2.bias"].shape[0]
    if not names:
        return "none", None
    if any(name.startswith("pointwise.") for name in names):
        return "separable", None
    kernel = trunk.get(f"{_MIX}fn.conv.weight")
    return ("conv" if kernel is not None and kernel.shape[1] > 1 else "depthwise"), None


def _patchconvnet(parts: Parts, wanted: Any, source: Any, _: dict[str, Any]) -> dict[str, Any]:
    """Options of PatchConvNet, which works at any image size."""
    token = parts.state.get("class_token")
    hidden, dim = parts.pool.get(f"{_FFN}fn.fc1.bias"), _dim(parts)
    stem = _stem(parts.state, dim)
    queries = 1 if token is None else token.shape[1]
    per_class = {"num_classes": queries, "head": "linear"} if queries > 1 else {}
    return dict(
        stem=stem["stem"],
        patch_size=stem["patch_size"],
        in_chans=stem["in_chans"],
        **{**_common(parts, dim), **per_class},
        img_size=_free_size(wanted, source),
        norm="batch" if f"{_MIX}norm.running_mean" in parts.trunk else "layer",
        aggregation="attention" if parts.pool else "average",
        queries="per_class" if queries > 1 else "one",
        mlp_ratio=3.0 if hidden is None else hidden.shape[0] / dim,
    )


def _common(parts: Parts, dim: int) -> dict[str, Any]:
    """Options that all architectures have."""
    hidden = parts.trunk.get(f"{_FFN}fn.fc1.bias")
    ratio = {} if hidden is None else {"mlp_ratio": hidden.shape[0] / dim}
    head = {"head": "none", "num_classes": 1} if parts.classes is None else {"num_classes": parts.classes}
    return {"dim": dim, "depth": parts.depth, **head, **ratio}


def _dim(parts: Parts) -> int:
    """The width, read from any norm of the trunk."""
    for name, tensor in parts.trunk.items():
        if name.endswith(("norm.weight", "norm.bias", "norm.alpha", "norm.beta")):
            return tensor.shape[0]
    raise PatchloomError("The width of the network cannot be determined: the checkpoint has no norm in a block.")


def _stem(state: State, dim: int) -> dict[str, Any]:
    """Kind, patch size, channels and norm of the stem, from the kernels of its convolutions."""
    if "stem.proj.weight" in state:
        weight = state["stem.proj.weight"]
        return {"stem": "linear", "patch_size": weight.shape[-1], "in_chans": weight.shape[1]}
    stem = {name: tensor for name, tensor in state.items() if name.startswith("stem.proj.")}
    kernels = {int(name.split(".")[2]): tensor for name, tensor in stem.items() if tensor.ndim == 4}
    if not kernels:
        raise PatchloomError("The checkpoint has no patch stem: stem.proj.weight (patch_embed.proj.weight) is missing.")
    step = 3 if any(tensor.ndim == 1 for tensor in stem.values()) else 2  # convolution, (norm,) GELU
    _check_stages(kernels, step, dim)
    sides = [kernels[i].shape[-1] for i in sorted(kernels)]
    normed = len(stem) > 2
    # one convolution with a bias; for patches of 2 or 4 pixels, hmlp and linear_norm are the same stem, called hmlp
    if len(sides) == 1 and "stem.proj.0.bias" in stem and (not normed or sides[0] not in (2, 4)):
        kind, patch = "linear_norm" if normed else "linear_gelu", sides[0]
        norm = {"stem_norm": "layer" if "stem.proj.1.norm.weight" in stem else "batch"} if normed else {}
        return {"stem": kind, "patch_size": patch, "in_chans": kernels[0].shape[1], **norm}
    # 3 x 3 convolutions of stride 2 each halve the image; those of hMLP have kernels as large as their stride.
    conv = sides[0] == 3
    return {
        "stem": "conv" if conv else "hmlp",
        "patch_size": 2 ** len(sides) if conv else prod(sides),
        "in_chans": kernels[0].shape[1],
        "stem_norm": "layer" if any(".norm." in name for name in stem) else "batch",
    }


def _check_stages(kernels: dict[int, Tensor], step: int, dim: int) -> None:
    """Raise PatchloomError if a convolution is missing: they are numbered 0, step, 2 step, ..., and the last has the
    width of the network."""
    last = max(kernels) if kernels[max(kernels)].shape[0] == dim else max(kernels) + step
    for i in range(0, last + 1, step):
        if i not in kernels:
            raise PatchloomError(
                f"A convolution of the stem is missing: stem.proj.{i}.weight "
                f"(patch_embed.proj.{i}.weight or patch_embed.proj.{i}.0.weight)."
            )


def _heads(parts: Parts, dim: int, width: int, hints: dict[str, Any]) -> int:
    """The number of heads, from the hints or as usual for heads of `width` channels."""
    if "heads" in hints:
        return hints["heads"]
    heads = _usual_heads(dim, width)
    parts.notes.append(f"heads={heads} is assumed, as in the papers for a width of {dim}: tensors do not determine it")
    return heads


def _usual_heads(dim: int, width: int) -> int:
    listed = [entry.config for entry in entries() if isinstance(entry.config, VitConfig) and entry.config.dim == dim]
    # the choice of the papers for this width, such as 16 heads of 80 channels in DeiT III's huge models
    for config in listed:
        if (config.aggregation == "class_attention") == (width == 48) and not config.name.endswith("nano"):
            return config.heads
    if dim % width:
        raise PatchloomError(
            f"The number of heads cannot be determined: the width {dim} is not a multiple of {width} as in the papers. "
            f"Pass heads=..."
        )
    return dim // width


def _positions_size(count: int, prefix: int, patch: int, wanted: Any, source: Any) -> tuple[tuple[int, int], int]:
    """The image size that `count` positions belong to, and how many of them belong to prefix tokens.

    A square wins over `wanted`, but not over `source`. Raises PatchloomError if nothing fits.
    """
    choices = sorted({prefix, 0}, reverse=True)
    requested = source if source is not None else wanted
    fitting = [rows for rows in choices if requested is not None and count - rows == prod(_grid(requested, patch))]
    # 196 = 14^2 positions, or 197 with one for the class token: whichever is a square.
    square = [rows for rows in choices if count > rows and isqrt(count - rows) ** 2 == count - rows]
    if source is None and square and square[0] not in fitting:
        return (isqrt(count - square[0]) * patch,) * 2, square[0]
    if fitting:
        return as_size(requested), fitting[0]
    raise _no_fit(count, patch, wanted, source)


def _free_size(wanted: Any, source: Any) -> tuple[int, int]:
    """The image size of a network without tensors that depend on it."""
    return as_size(source if source is not None else wanted if wanted is not None else 224)


def _grid(size: Any, patch: int) -> tuple[int, int]:
    height, width = as_size(size)
    return height // patch, width // patch


def _no_fit(count: int, patch: int, wanted: Any, source: Any) -> PatchloomError:
    requested = (
        f"source_size={source}" if source is not None else f"img_size={wanted}" if wanted is not None else "a square"
    )
    return PatchloomError(
        f"The checkpoint has {count} positions or patches (of {patch} x {patch} pixels), which do not fit {requested}. "
        f"Pass source_size=(height, width), the image size of its training."
    )
