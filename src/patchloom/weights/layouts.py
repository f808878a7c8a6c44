"""Layouts, that is, tensor names: patchloom's, the official repositories' and timm's. One table of rules per layout is
used in both directions.

A rule pairs our name with theirs; `{i}` stands for a number; what follows the name (".weight") is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config
from patchloom.models.patchconvnet import PatchConvNetConfig
from patchloom.models.resmlp import ResmlpConfig
from patchloom.models.vit import VitConfig

Rules = list[tuple[str, str]]
State = dict[str, Tensor]

LAYOUTS = ("patchloom", "official", "timm")

_OUTSIDE: Rules = [
    ("class_token", "cls_token"),
    ("distill_token", "dist_token"),
    ("positions", "pos_embed"),
    ("stem", "patch_embed"),
    ("norm", "norm"),
    ("head", "head"),
    ("head_distill", "head_dist"),
]
_CONV_STEM: Rules = [("stem.proj.{i}", "patch_embed.proj.{i}.0")]
_CONV_BRANCH: Rules = [
    (f"blocks.{{i}}.mixing.branches.0.fn.{ours}", f"blocks.{{i}}.attn.qkv_pos.{theirs}")
    for ours, theirs in (("expand", "0"), ("depthwise", "2"), ("squeeze_excite", "4"), ("project", "5"))
]
_TIMM_RESMLP: Rules = [
    ("stem", "stem"),
    ("blocks.{i}.mixing.branches.0.norm", "blocks.{i}.norm1"),
    ("blocks.{i}.mixing.branches.0.fn", "blocks.{i}.linear_tokens"),
    ("blocks.{i}.mixing.branches.0.scale.gamma", "blocks.{i}.ls1"),
    ("blocks.{i}.ffn.branches.0.norm", "blocks.{i}.norm2"),
    ("blocks.{i}.ffn.branches.0.fn", "blocks.{i}.mlp_channels"),
    ("blocks.{i}.ffn.branches.0.scale.gamma", "blocks.{i}.ls2"),
    ("norm", "norm"),
    ("head", "head"),
]


def _official_blocks(ours: str, theirs: str, branches: int = 1) -> Rules:
    """Branch 0 is norm1, attn, gamma_1, norm2, mlp, gamma_2; branch p is norm1p, attnp, gamma_1_p and so on."""
    rules: Rules = []
    for p in range(branches):
        digit, suffix = (str(p), f"_{p}") if p else ("", "")
        for number, residual, layer in ((1, "mixing", "attn"), (2, "ffn", "mlp")):
            # Doubled braces keep {i} in the rule: it is filled in when a name is matched.
            at = f"{ours}.{{i}}.{residual}.branches.{p}"
            rules += [
                (f"{at}.norm", f"{theirs}.{{i}}.norm{number}{digit}"),
                (f"{at}.fn", f"{theirs}.{{i}}.{layer}{digit}"),
                (f"{at}.scale.gamma", f"{theirs}.{{i}}.gamma_{number}{suffix}"),
            ]
    return rules


def official_rules(branches: int = 1) -> Rules:
    """The rules of the official repositories, for networks with this many parallel branches."""
    # Rules are tried in this order: qkv_pos must match before the general attn.
    trunk, pool = _official_blocks("blocks", "blocks", branches), _official_blocks("pool", "blocks_token_only")
    return _CONV_BRANCH + trunk + pool + _OUTSIDE


def _timm_vit_rules(branches: int) -> Rules:
    if branches == 1:
        scales = [
            ("blocks.{i}.mixing.branches.0.scale", "blocks.{i}.ls1"),
            ("blocks.{i}.ffn.branches.0.scale", "blocks.{i}.ls2"),
        ]
        return scales + official_rules()
    rules: Rules = []
    for p in range(branches):
        for residual, group, layer in (("mixing", "attns", "attn"), ("ffn", "ffns", "mlp")):
            at, there = f"blocks.{{i}}.{residual}.branches.{p}", f"blocks.{{i}}.{group}.{p}"
            rules += [(f"{at}.norm", f"{there}.norm"), (f"{at}.fn", f"{there}.{layer}"), (f"{at}.scale", f"{there}.ls")]
    return rules + _OUTSIDE


def rename(name: str, rules: Rules, back: bool = False) -> str | None:
    """The name in the other layout, from ours or (with `back`) to ours; None if no rule matches."""
    for pattern, target in _compiled(tuple(rules), back):
        if match := pattern.fullmatch(name):
            # A rule has at most one number; `rest` is what follows the name, such as ".weight".
            *numbers, rest = match.groups()
            return target.format(i=numbers[0] if numbers else "") + (rest or "")
    return None


@lru_cache
def _compiled(rules: tuple[tuple[str, str], ...], back: bool) -> list[tuple[re.Pattern[str], str]]:
    pairs = [(theirs, ours) if back else (ours, theirs) for ours, theirs in rules]
    return [
        # re.escape turns {i} into \{i\}, which becomes a group of digits.
        (re.compile(re.escape(source).replace(r"\{i\}", r"(\d+)") + r"(\..+)?"), target)
        for source, target in pairs
    ]


def to_ours(state: Mapping[str, Tensor], layout: str | None = None) -> tuple[str, State, list[str]]:
    """Rename a state dict to our names: returns the layout, the renamed tensors, and the names that no rule matches.

    The layout is recognised from the names, unless `layout` is "patchloom". Raises PatchloomError if it is unknown.

    Args:
        state: tensors as a file has them.
        layout: what the file says, if it is ours; None to recognise it.
    """
    layout, rules = ("patchloom", []) if layout == "patchloom" else _recognise(state)
    if layout == "patchloom":
        return layout, dict(state), []
    renamed: State = {}
    unknown: list[str] = []
    for name, tensor in _join_class_heads(state).items():
        ours = rename(name, rules, back=True)
        if ours is None:
            unknown.append(name)
        else:
            renamed[ours] = tensor.flatten() if re.search(r"\.(alpha|beta)$", ours) else tensor  # timm has (1, 1, D)
    return layout, renamed, unknown


def _recognise(state: Mapping[str, Tensor]) -> tuple[str, Rules]:
    if any(re.match(r"(blocks|pool)\.\d+\.(mixing|ffn)\.branches\.", name) for name in state):
        return "patchloom", []
    # The order matters: timm's parallel blocks and LayerScale are tested before what both layouts share.
    if any(".linear_tokens." in name for name in state):
        return "timm", _TIMM_RESMLP
    if branches := count(state, r"blocks\.\d+\.attns\.(\d+)\."):
        return "timm", _timm_vit_rules(branches)
    if any(re.match(r"blocks\.\d+\.ls1\.gamma", name) for name in state):
        return "timm", _timm_vit_rules(1)
    rules = _CONV_STEM + official_rules(count(state, r"blocks\.\d+\.attn(\d+)\.") or 1)
    if not any(rename(name, rules, back=True) for name in state):
        some = ", ".join(sorted(state)[:3]) + (" ..." if len(state) > 3 else "")
        raise PatchloomError(f"These tensors do not match a known layout ({', '.join(LAYOUTS)}): {some}.")
    return "official", rules


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that the pattern finds in a name, or 0.

    Raises PatchloomError if a number exceeds the number of tensors: a forged name must not create a huge network.
    """
    numbers = {name: int(match[1]) for name in state if (match := re.match(pattern, name))}
    for name, number in numbers.items():
        if number >= len(state):
            raise PatchloomError(f"{name} is numbered {number}, but there are only {len(state)} tensors in all.")
    return max(numbers.values(), default=-1) + 1


def their_name(name: str, config: Config, layout: str) -> str:
    """The name of a tensor in a file of this layout, followed by our name if that differs."""
    theirs = None if layout == "patchloom" else rename(name, _rules_for(config, layout))
    return name if theirs in (None, name) else f"{theirs} (ours: {name})"


def from_ours(state: State, config: Config, layout: str) -> State:
    """Tensors of a patchloom network under the names and in the shapes of another layout.

    Raises PatchloomError if the layout has no counterpart for the network.

    Args:
        state: tensors under our names.
        config: of their network: decides which names and shapes the layout has.
        layout: "patchloom", "official" or "timm".
    """
    if layout == "patchloom":
        return state
    rules = _rules_for(config, layout)
    renamed: State = {}
    for name, tensor in state.items():
        theirs = rename(name, rules)
        if theirs is None:
            raise PatchloomError(
                f"The {layout} layout has no name for {name} of {config.name}; use layout='patchloom'."
            )
        renamed[theirs] = tensor
    if layout == "timm":
        _as_timm_shapes(renamed, config)
    elif getattr(config, "queries", "one") == "per_class":
        _split_class_heads(renamed)
    return renamed


def _rules_for(config: Any, layout: str) -> Rules:
    if layout not in LAYOUTS:
        suggestion = did_you_mean(layout, LAYOUTS)
        raise PatchloomError(f"Unknown layout {layout!r}. Choose from: {', '.join(LAYOUTS)}.{suggestion}")
    if config.head not in ("linear", "none"):
        raise PatchloomError(
            f"The {layout} layout does not support the head {config.head!r} of {config.name}; use layout='patchloom'."
        )
    if layout == "timm" and _in_timm(config):
        if isinstance(config, ResmlpConfig):
            return _TIMM_RESMLP
        staged = config.aggregation == "class_attention"
        return official_rules() if staged else _timm_vit_rules(config.branches)
    if layout == "official" and isinstance(config, ResmlpConfig) and _published(config):
        return official_rules()
    if layout == "official" and isinstance(config, VitConfig) and _in_official(config):
        return official_rules(config.branches)
    if layout == "official" and isinstance(config, PatchConvNetConfig):
        return _CONV_STEM + official_rules()
    raise PatchloomError(
        f"{config.name} with these options has no counterpart in the {layout} layout; use layout='patchloom'."
    )


def _in_timm(config: Any) -> bool:
    """Whether timm has a network that computes the same function."""
    if isinstance(config, ResmlpConfig):
        plain = (config.mixing, config.norm, config.aggregation) == ("linear", "affine", "average")
        return plain and _published(config)
    if not isinstance(config, VitConfig) or config.norm_position != "pre":
        return False
    if config.stem != "linear" or config.scale not in ("none", "layerscale"):
        return False
    if config.aggregation == "class_attention":
        plain = config.class_in_keys and config.class_scale and not config.distilled and config.branches == 1
        return config.talking_heads and config.scale == "layerscale" and plain
    return config.aggregation == "class_token" and config.class_token_at == 0 and not config.talking_heads


def _published(config: ResmlpConfig) -> bool:
    """Whether a ResMLP uses only options of the published code: not those of thesis 4.3.4, not the shift after a branch
    (Eq. 4.2), and GELU, since tensor names do not tell the activation."""
    others = config.norm == "batch" or config.positions != "none" or config.post != "scale"
    return not others and config.activation == "gelu"


def _in_official(config: VitConfig) -> bool:
    """Whether the tensor names of the official layout determine what the network computes."""
    determined = config.scale in ("none", "layerscale") and config.aggregation in ("class_token", "class_attention")
    ours = config.norm_position == "post" or config.stem in ("linear_norm", "linear_gelu")
    return determined and config.class_token_at == 0 and config.class_in_keys and not ours


def _as_timm_shapes(state: State, config: Any) -> None:
    """Change shapes in place: (D) affine parameters to (1, 1, D), and a zero position for each prefix token."""
    for name, tensor in state.items():
        if re.search(r"\.(alpha|beta)$", name):
            state[name] = tensor[None, None]
    if written_config(config, "timm") != config:
        # F.pad counts from the last dimension: (0, 0) for channels, (prefix, 0) adds rows in front of the patches.
        state["pos_embed"] = F.pad(state["pos_embed"], (0, 0, config.prefix_tokens, 0))


def written_config(config: Config, layout: str) -> Config:
    """The config of the network in a file of this layout.

    timm's parallel ViTs have a position for the class token; a zero position computes the same function.
    """
    parallel = isinstance(config, VitConfig) and config.family == "vit" and config.aggregation == "class_token"
    if layout == "timm" and parallel:
        return config.replace(positions="all")
    return config


def _split_class_heads(state: State) -> None:
    """Split the head into one Linear(D, 1) per class, as the official code stores heads with one query per class."""
    weight, bias = state.pop("head.weight"), state.pop("head.bias")
    for c in range(weight.shape[0]):
        state[f"head.{c}.weight"], state[f"head.{c}.bias"] = weight[c : c + 1], bias[c : c + 1]


def _join_class_heads(state: Mapping[str, Tensor]) -> State:
    """The inverse of `_split_class_heads`; other state dicts are returned as they are."""
    classes = count(state, r"head\.(\d+)\.(?:weight|bias)$")
    if not classes:
        return dict(state)
    joined = {name: tensor for name, tensor in state.items() if not re.match(r"head\.\d+\.", name)}
    for kind in ("weight", "bias"):
        if missing := [f"head.{c}.{kind}" for c in range(classes) if f"head.{c}.{kind}" not in state]:
            raise PatchloomError(f"The checkpoint has one head per class, but lacks {', '.join(missing[:8])}.")
        heads = [state[f"head.{c}.{kind}"] for c in range(classes)]
        if any(head.shape != heads[0].shape or head.shape[:1] != (1,) for head in heads):
            raise PatchloomError(f"head.0.{kind} and the following do not have the shapes of one head per class.")
        # (1, D) weights of every class, stacked to (classes, D).
        joined[f"head.{kind}"] = torch.cat(heads)
    return joined
