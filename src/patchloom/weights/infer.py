"""The architecture that a state dict (under our names) was made by, read off its tensors."""

from __future__ import annotations

import re
from dataclasses import fields
from math import isqrt, prod
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.layers.stems import HMLPStem
from patchloom.models.config import Config, as_size
from patchloom.models.patchconvnet import PatchConvNetConfig
from patchloom.models.registry import entries
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig

State = dict[str, Tensor]
_MIX, _FFN = "blocks.0.mixing.branches.0.", "blocks.0.ffn.branches.0."
_FREE = (
    "name",
    "family",
    "num_classes",
    "img_size",
    "in_chans",
    "drop_path",
    "scale_value",
    "scale_rule",
    "drop_path_decay",
)


def infer_config(state: State, wanted: Any = None, source: Any = None, **hints: Any) -> Config:
    """The config whose network holds these tensors.

    `wanted` is the image size asked for: a token count that fits it is taken as recorded at it, any other as a square;
    `source` (height, width) settles it. `hints` are options that tensors cannot tell.
    """
    config: Config
    if f"{_MIX}fn.expand.weight" in state:
        config = _patchconvnet(state, wanted, source, hints)
    elif f"{_MIX}fn.qkv.weight" in state:
        config = _vit(state, wanted, source, hints)
    elif f"{_FFN}fn.fc1.weight" in state:
        config = _resmlp(state, wanted, source, hints)
    else:
        raise PatchloomError(f"No known network has the tensors {', '.join(sorted(state)[:3])} ...")
    return _named(config)


def _vit(state: State, wanted: Any, source: Any, hints: dict[str, Any]) -> VitConfig:
    VitConfig.check_known(hints, "The network in the file")
    dim = state["class_token" if "class_token" in state else "positions"].shape[-1]
    stem = _stem(state)
    staged, distilled = "pool.0.mixing.branches.0.norm.weight" in state, "distill_token" in state
    talking = state.get(f"{_MIX}fn.proj_l.weight")
    prefix = 0 if staged else ("class_token" in state) + distilled
    size, position_prefix = _positions_size(
        _need(state, "positions").shape[1], prefix, stem["patch_size"], wanted, source
    )
    options = dict(
        **stem,
        **_common(state, dim),
        img_size=size,
        heads=talking.shape[0] if talking is not None else _heads(dim, 48 if staged else 64, hints),
        branches=_count(state, r"blocks\.0\.mixing\.branches\.(\d+)\."),
        talking_heads=talking is not None,
        positions="all" if position_prefix else "patches",
        scale="layerscale" if f"{_MIX}scale.gamma" in state else "none",
        aggregation="class_attention" if staged else "class_token" if "class_token" in state else "average",
        class_depth=_count(state, r"pool\.(\d+)\.") or 2,
        class_scale=not staged or "pool.0.mixing.branches.0.scale.gamma" in state,
        distilled=distilled,
    )
    return VitConfig(**{**options, **hints})


def _resmlp(state: State, wanted: Any, source: Any, hints: dict[str, Any]) -> ResmlpConfig:
    ResmlpConfig.check_known(hints, "The network in the file")
    stem = _stem(state)
    dim, patch = state["stem.proj.weight"].shape[0], stem["patch_size"]
    mixing, tokens = "none", None
    if (matrix := state.get(f"{_MIX}fn.weight")) is not None:
        mixing, tokens = "linear", matrix.shape[0]
    elif (matrix := state.get(f"{_MIX}fn.fc1.weight")) is not None:
        mixing, tokens = "mlp", matrix.shape[1]
    elif (conv := state.get(f"{_MIX}fn.conv.weight")) is not None:
        separable = f"{_MIX}fn.pointwise.weight" in state
        mixing = "conv" if conv.shape[1] > 1 else "separable" if separable else "depthwise"
    class_mlp = state.get("pool.0.mixing.branches.0.fn.weight")
    if class_mlp is not None:
        tokens = class_mlp.shape[1] - 1
    options = dict(
        patch_size=patch,
        in_chans=stem["in_chans"],
        **_common(state, dim),
        img_size=_free_size(wanted, source) if tokens is None else _size_of(tokens, patch, wanted, source),
        norm="affine" if "norm.alpha" in state else "layer",
        mixing=mixing,
        aggregation="average" if class_mlp is None else "class_mlp",
        class_depth=_count(state, r"pool\.(\d+)\.") or 2,
    )
    return ResmlpConfig(**{**options, **hints})


def _patchconvnet(state: State, wanted: Any, source: Any, hints: dict[str, Any]) -> PatchConvNetConfig:
    PatchConvNetConfig.check_known(hints, "The network in the file")
    dim = state[f"{_MIX}fn.expand.weight"].shape[0]
    pool = state.get("pool.0.ffn.branches.0.fn.fc1.weight")
    options = dict(
        **_stem(state),
        **_common(state, dim),
        img_size=_free_size(wanted, source),
        norm="batch" if f"{_MIX}norm.running_mean" in state else "layer",
        aggregation="average" if pool is None else "attention",
        queries="per_class" if "class_token" in state and state["class_token"].shape[1] > 1 else "one",
        mlp_ratio=3.0 if pool is None else pool.shape[0] / dim,
    )
    options.pop("stem_norm", None)
    return PatchConvNetConfig(**{**options, **hints})


def _common(state: State, dim: int) -> dict[str, Any]:
    hidden = state.get(f"{_FFN}fn.fc1.weight")
    options: dict[str, Any] = {"dim": dim, "depth": _count(state, r"blocks\.(\d+)\."), "num_classes": 1000}
    if "head.weight" in state:
        options["num_classes"] = state["head.weight"].shape[0]
    if hidden is not None:
        options["mlp_ratio"] = hidden.shape[0] / dim
    return options


def _stem(state: State) -> dict[str, Any]:
    """Kind, patch size and channels of the stem, from the kernels of its convolutions."""
    if "stem.proj.weight" in state:
        weight = state["stem.proj.weight"]
        return {"stem": "linear", "patch_size": weight.shape[-1], "in_chans": weight.shape[1]}
    kernels = {name: tensor for name, tensor in state.items() if name.startswith("stem.") and tensor.ndim == 4}
    if not kernels:
        raise PatchloomError("The checkpoint has no patch stem: stem.proj.weight (patch_embed.proj.weight) is missing.")
    sides = [tensor.shape[-1] for tensor in kernels.values()]
    first = state[min(kernels, key=lambda name: int(name.split(".")[2]))]
    norm = "layer" if any(".norm." in name for name in state if name.startswith("stem.")) else "batch"
    if 3 in sides:
        return {"stem": "conv", "patch_size": 2 ** len(sides), "in_chans": first.shape[1], "stem_norm": norm}
    if tuple(sides) not in HMLPStem.STRIDES.values() and prod(sides) not in HMLPStem.STRIDES:
        raise PatchloomError(f"The stem's kernels {sides} are those of no known stem.")
    return {"stem": "hmlp", "patch_size": prod(sides), "in_chans": first.shape[1], "stem_norm": norm}


def _heads(dim: int, width: int, hints: dict[str, Any]) -> int:
    if "heads" in hints:
        return hints["heads"]
    if dim % width:
        raise PatchloomError(
            f"Tensors do not tell how many heads a width of {dim} is split into, and it is not a multiple of {width} "
            f"as in the papers: pass heads=..."
        )
    return dim // width


def _positions_size(count: int, prefix: int, patch: int, wanted: Any, source: Any) -> tuple[tuple[int, int], int]:
    """The image size that a table of positions was made at, and how many of its rows belong to prefix tokens."""
    choices = sorted({prefix, 0}, reverse=True)
    for size in (source,) if source is not None else (wanted,):
        if size is not None:
            grid = _grid(size, patch)
            for rows in choices:
                if count - rows == prod(grid):
                    return as_size(size), rows
    if source is None:
        for rows in choices:
            if isqrt(count - rows) ** 2 == count - rows:
                return (isqrt(count - rows) * patch,) * 2, rows
    raise _no_fit(count, patch, wanted, source)


def _size_of(tokens: int, patch: int, wanted: Any, source: Any) -> tuple[int, int]:
    return _positions_size(tokens, 0, patch, wanted, source)[0]


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


def _need(state: State, name: str) -> Tensor:
    if name not in state:
        raise PatchloomError(f"The checkpoint lacks {name}, without which its network cannot be told.")
    return state[name]


def _count(state: State, pattern: str) -> int:
    return max((int(match[1]) + 1 for name in state if (match := re.match(pattern, name))), default=0)


def _named(config: Config) -> Config:
    """The listed model of this shape, if there is one, lends its name and what tensors do not tell."""
    for entry in entries():
        listed = entry.config
        if type(listed) is type(config) and all(
            getattr(listed, field.name) == getattr(config, field.name)
            for field in fields(config)
            if field.name not in _FREE
        ):
            told = {"num_classes", "img_size", "in_chans"} | ({"drop_path"} if config.drop_path else set())
            return listed.replace(**{name: getattr(config, name) for name in told})
    return config.replace(family=_family(config))


def _family(config: Config) -> str:
    if not isinstance(config, VitConfig):
        return config.architecture
    if config.talking_heads or config.aggregation == "class_attention":
        return "cait"
    if config.position_prefix:
        return "deit"
    return "deit3" if config.scale == "layerscale" and config.branches == 1 else "vit"
