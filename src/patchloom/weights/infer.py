"""The architecture that a state dict (under our names) was made by, read off its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
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

_MIX, _FFN = "mixing.branches.0.", "ffn.branches.0."
_FREE = {  # what tensors do not tell, or what does not make another model
    *("name", "family", "num_classes", "img_size", "in_chans"),
    *("drop_path", "drop_path_decay", "dropout", "scale_value", "scale_rule"),
}


class Parts:
    """A state dict sorted for reading: `trunk` and `pool` hold what any of their blocks has, under the names within a
    block, so that a tensor which one block lacks is still told from a tensor which the network does not have."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.notes: list[str] = []  # what was assumed
        self.trunk = self._any_block("blocks")
        self.pool = self._any_block("pool")
        self.depth = count(state, r"blocks\.(\d+)\.")
        self.class_depth = count(state, r"pool\.(\d+)\.") or 2

    def mixes_by(self, *layers: str) -> bool:
        """Whether the mixing of a trunk block has any of these layers or tensors."""
        return any(name.startswith(f"{_MIX}fn.{layer}") for name in self.trunk for layer in layers)

    def _any_block(self, stage: str) -> State:
        matches = ((re.fullmatch(rf"{stage}\.\d+\.(.+)", name), tensor) for name, tensor in self.state.items())
        return {match[1]: tensor for match, tensor in matches if match}

    @property
    def classes(self) -> int:
        heads = (f"{head}.{kind}" for head in ("head", "head_distill") for kind in ("weight", "bias"))
        return next((self.state[name].shape[0] for name in heads if name in self.state), 1000)

    @property
    def distilled(self) -> bool:
        return any(name.startswith(("distill_token", "head_distill.")) for name in self.state)


def infer_config(state: State, wanted: Any = None, source: Any = None, **hints: Any) -> tuple[PatchConfig, list[str]]:
    """The config whose network holds these tensors, and notes of what had to be assumed.

    `wanted` is the image size asked for: a token count that fits it is taken as recorded at it, any other as a square;
    `source` (height, width) settles it. `hints` are options that tensors cannot tell.
    """
    parts = Parts(state)
    if not parts.trunk:
        raise PatchloomError(f"No known network has the tensors {', '.join(sorted(state)[:3])} ...")
    kind, read = _reader(parts)
    kind.check_known(hints, "The network in the file")
    try:
        options = read(parts, wanted, source, hints)
    except IndexError as error:
        raise PatchloomError(f"A tensor has fewer dimensions than its name promises ({error}).") from error
    return _named(kind(**{**options, **hints}), hints), parts.notes


def check_described(config: PatchConfig, state: State, label: str, strict: bool) -> None:
    """Refuse a config that the tensors of its file contradict, before a network of its size is built.

    Without `strict` tensors may be missing, and with them blocks, branches and heads.
    """
    positions = config.patches + getattr(config, "position_prefix", 0)
    for option, found in _measured(config, state).items():
        value = getattr(config, option)
        told, what = (positions, "positions") if option == "img_size" else (value, option)
        incomplete = not strict and option in ("depth", "class_depth", "branches") and told > found
        if told != found and not incomplete:
            raise PatchloomError(f"{label} says that {option} is {value}, but its tensors have {what} {found}.")


def _measured(config: PatchConfig, state: State) -> dict[str, int]:
    """What the tensors tell of the options that decide how large a network is; `img_size` as a number of positions."""
    kernels = [(name, tensor) for name, tensor in state.items() if name.startswith("stem.proj.") and tensor.ndim == 4]
    first = min(kernels, key=lambda pair: [int(part) for part in pair[0].split(".") if part.isdigit()], default=None)
    norms = (t for name, t in state.items() if re.fullmatch(r"blocks\..*norm\.(weight|bias|alpha|beta)", name))
    sizes = {
        "depth": count(state, r"blocks\.(\d+)\."),
        "class_depth": count(state, r"pool\.(\d+)\."),
        "branches": count(state, r"blocks\.\d+\.mixing\.branches\.(\d+)\."),
        "in_chans": first[1].shape[1] if first else 0,
        "dim": next((tensor.shape[0] for tensor in norms if tensor.ndim == 1), 0),
        "num_classes": next((state[n].shape[0] for n in ("head.bias", "head_distill.bias") if _has(state, n, 1)), 0),
        "img_size": state["positions"].shape[1] if _has(state, "positions", 3) else 0,
    }
    return {option: size for option, size in sizes.items() if size and hasattr(config, option)}


def _has(state: State, name: str, dimensions: int) -> bool:
    return name in state and state[name].ndim == dimensions


def _reader(parts: Parts) -> tuple[type[PatchConfig], Callable[..., dict[str, Any]]]:
    """The kind of network, told by what mixes its patches, and what reads its options."""
    if parts.mixes_by("expand", "depthwise", "squeeze_excite"):
        return PatchConvNetConfig, _patchconvnet
    return (VitConfig, _vit) if parts.mixes_by("qkv", "proj") else (ResmlpConfig, _resmlp)


def _vit(parts: Parts, wanted: Any, source: Any, hints: dict[str, Any]) -> dict[str, Any]:
    dim = _dim(parts)
    stem = _stem(parts.state, dim)
    staged, talking = bool(parts.pool), parts.trunk.get(f"{_MIX}fn.proj_l.bias")
    # patches are averaged only where a hint says so: without it a class token that is not there is a missing one
    aggregation = hints.get("aggregation", "class_attention" if staged else "class_token")
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
    dim = _dim(parts)
    stem = _stem(parts.state, dim)
    patch = stem["patch_size"]
    mixing, tokens = _mixing(parts.trunk)
    positions = parts.state.get("positions")
    if tokens is None and (row := parts.pool.get(f"{_MIX}fn.weight")) is not None:
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
    """The norm of a ResMLP's residuals."""
    if any(name.endswith("norm.running_mean") for name in trunk):
        return "batch"
    return "affine" if any(name.endswith("norm.alpha") for name in trunk) else "layer"


def _mixing(trunk: State) -> tuple[str, int | None]:
    """The cross-patch layer of a ResMLP, and the number of patches where it tells."""
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
    token = parts.state.get("class_token")
    hidden, dim = parts.pool.get(f"{_FFN}fn.fc1.bias"), _dim(parts)
    stem = _stem(parts.state, dim)
    return dict(
        stem=stem["stem"],
        patch_size=stem["patch_size"],
        in_chans=stem["in_chans"],
        **_common(parts, dim),
        img_size=_free_size(wanted, source),
        norm="batch" if f"{_MIX}norm.running_mean" in parts.trunk else "layer",
        aggregation="attention" if parts.pool else "average",
        queries="per_class" if token is not None and token.shape[1] > 1 else "one",
        mlp_ratio=3.0 if hidden is None else hidden.shape[0] / dim,
    )


def _common(parts: Parts, dim: int) -> dict[str, Any]:
    hidden = parts.trunk.get(f"{_FFN}fn.fc1.bias")
    ratio = {} if hidden is None else {"mlp_ratio": hidden.shape[0] / dim}
    return {"dim": dim, "depth": parts.depth, "num_classes": parts.classes, **ratio}


def _dim(parts: Parts) -> int:
    """The width, which every norm of a trunk has."""
    for name, tensor in parts.trunk.items():
        if name.endswith(("norm.weight", "norm.bias", "norm.alpha", "norm.beta")):
            return tensor.shape[0]
    raise PatchloomError("No tensor of the checkpoint tells the width of its network.")


def _stem(state: State, dim: int) -> dict[str, Any]:
    """Kind, patch size and channels of the stem, from the kernels of its convolutions."""
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
    # one convolution with a bias; hmlp with patches of 2 or 4 pixels is the same stem as linear_norm
    if len(sides) == 1 and "stem.proj.0.bias" in stem and (not normed or sides[0] not in (2, 4)):
        kind, patch = "linear_norm" if normed else "linear_gelu", sides[0]
        norm = {"stem_norm": "layer" if "stem.proj.1.norm.weight" in stem else "batch"} if normed else {}
        return {"stem": kind, "patch_size": patch, "in_chans": kernels[0].shape[1], **norm}
    conv = sides[0] == 3
    return {
        "stem": "conv" if conv else "hmlp",
        "patch_size": 2 ** len(sides) if conv else prod(sides),
        "in_chans": kernels[0].shape[1],
        "stem_norm": "layer" if any(".norm." in name for name in stem) else "batch",
    }


def _check_stages(kernels: dict[int, Tensor], step: int, dim: int) -> None:
    """Convolutions stand `step` apart from 0 on, up to the one that is as wide as the network."""
    last = max(kernels) if kernels[max(kernels)].shape[0] == dim else max(kernels) + step
    for i in range(0, last + 1, step):
        if i not in kernels:
            raise PatchloomError(
                f"A convolution of the stem is missing: stem.proj.{i}.weight "
                f"(patch_embed.proj.{i}.weight or patch_embed.proj.{i}.0.weight)."
            )


def _heads(parts: Parts, dim: int, width: int, hints: dict[str, Any]) -> int:
    if "heads" in hints:
        return hints["heads"]
    heads = _usual_heads(dim, width)
    parts.notes.append(f"heads={heads} is assumed, as in the papers for a width of {dim}: tensors do not tell")
    return heads


def _usual_heads(dim: int, width: int) -> int:
    listed = [entry.config for entry in entries() if isinstance(entry.config, VitConfig) and entry.config.dim == dim]
    for config in listed:  # the papers' own choice for this width: 16 heads of 80 channels in DeiT III's huge models
        if (config.aggregation == "class_attention") == (width == 48) and not config.name.endswith("nano"):
            return config.heads
    if dim % width:
        raise PatchloomError(
            f"Tensors do not tell how many heads a width of {dim} is split into, and it is not a multiple of {width} "
            f"as in the papers: pass heads=..."
        )
    return dim // width


def _positions_size(count: int, prefix: int, patch: int, wanted: Any, source: Any) -> tuple[tuple[int, int], int]:
    """The image size that a table of positions was made at, and how many of its rows belong to prefix tokens."""
    choices = sorted({prefix, 0}, reverse=True)
    given = source if source is not None else wanted
    as_given = [rows for rows in choices if given is not None and count - rows == prod(_grid(given, patch))]
    square = [rows for rows in choices if count > rows and isqrt(count - rows) ** 2 == count - rows]
    if source is None and square and square[0] not in as_given:
        return (isqrt(count - square[0]) * patch,) * 2, square[0]
    if as_given:
        return as_size(given), as_given[0]
    raise _no_fit(count, patch, wanted, source)


def _free_size(wanted: Any, source: Any) -> tuple[int, int]:
    return as_size(source if source is not None else wanted if wanted is not None else 224)


def _grid(size: Any, patch: int) -> tuple[int, int]:
    height, width = as_size(size)
    return height // patch, width // patch


def _no_fit(count: int, patch: int, wanted: Any, source: Any) -> PatchloomError:
    asked = (
        f"source_size={source}" if source is not None else f"img_size={wanted}" if wanted is not None else "a square"
    )
    return PatchloomError(
        f"The checkpoint has {count} positions or patches (of {patch} x {patch} pixels), which do not fit {asked}: "
        f"pass source_size=(height, width), the image size that it was made at."
    )


def _named(config: PatchConfig, hints: dict[str, Any]) -> PatchConfig:
    """The listed model of this shape, if there is one, lends its name and what tensors do not tell."""
    for entry in entries():
        listed = entry.config
        if type(listed) is type(config) and all(
            getattr(listed, field.name) == getattr(config, field.name)
            for field in fields(config)
            if field.name not in _FREE
        ):
            told = {name: getattr(config, name) for name in ("num_classes", "img_size", "in_chans")}
            return listed.replace(**{**told, **hints})
    return config.replace(**{"family": _family(config), **hints})


def _family(config: PatchConfig) -> str:
    if not isinstance(config, VitConfig):
        return config.architecture
    if config.talking_heads or config.aggregation == "class_attention":
        return "cait"
    if config.position_prefix:
        return "deit"
    return "deit3" if config.scale == "layerscale" and config.branches == 1 else "vit"
