"""Where a network looks: one map a picture, on its grid of patches, from what the network itself computes.

Shapes: a map is (grid height, grid width); attention is (heads, queries, keys); P prefix tokens come before N patches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.explaining.baselines import grad_cam, occlusion
from patchloom.layers.attention import Attention, ClassAttention, capture_attention
from patchloom.layers.mixing import ClassMLP, CrossPatchLinear
from patchloom.layers.residual import Branch
from patchloom.layers.scales import LayerScale
from patchloom.models.features import TokenLayout
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork, patch_network

MAPS = ("class-attention", "rollout", "pooling", "per-class", "cross-patch", "grad-cam", "occlusion")
TOKENS = ("class", "distillation")
CENTRAL = 6  # patches along a side whose rows are shown (thesis Fig. 4.2)


@dataclass(frozen=True)
class Seen:
    """One image as a network saw it."""

    network: PatchNetwork
    x: Tensor  # (1, C, height, width), normalised
    layout: TokenLayout
    logits: Tensor  # (classes,)
    attention: dict[str, Tensor]  # by layer, (heads, queries, keys), after softmax
    shown: tuple[int, ...]  # the classes that a map a class is made for, best first
    target: int  # the class that grad-cam and occlusion explain


def look(network: Network, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits (classes,) of one image, by the fast path, and its attention (heads, queries, keys) by layer."""
    with torch.inference_mode():
        logits = network(x)
        with capture_attention(network) as captured:
            network(x)
    assert isinstance(logits, Tensor)
    return logits[0].float(), {name: weights[0].float() for name, weights in captured.items()}


def available_maps(network: Network) -> tuple[str, ...]:
    """The maps that a network can give: its own, then those that every network can."""
    if not isinstance(network, PatchNetwork):
        return ()  # the maps are read off the parts of our own networks
    inside = [module for block in network.blocks for module in block.modules()]
    pooled = [module for block in network.pool for module in block.modules() if isinstance(module, ClassAttention)]
    attends = any(isinstance(module, Attention) for module in inside)
    own = {
        "class-attention": bool(network.num_prefix)
        and ((attends and network.join_at is not None) or any(layer.role == "attention" for layer in pooled)),
        "rollout": attends,
        "pooling": any(layer.role == "pool" for layer in pooled) and not network.per_class,
        "per-class": network.per_class,
        "cross-patch": any(isinstance(module, CrossPatchLinear) for module in inside),
    }
    return (*(name for name in MAPS if own.get(name)), "grad-cam", "occlusion")


def check_maps(network: Network, names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The maps that were asked for, each once; what the network cannot give is refused."""
    possible, names = available_maps(patch_network(network)), (names,) if isinstance(names, str) else names
    for name in names or ():
        if name not in MAPS:
            raise PatchloomError(f"There is no map {name!r}.{did_you_mean(name, MAPS)} Maps: {', '.join(MAPS)}.")
        if name not in possible:
            raise PatchloomError(
                f"{network.config.name} cannot give the map {name!r}; it can give {', '.join(possible)}."
            )
    return possible if names is None else tuple(dict.fromkeys(names))


def make_maps(seen: Seen, names: Sequence[str]) -> dict[str, Tensor]:
    """Maps (grid height, grid width) by name; those of a second token or of a class are "NAME: WHICH"."""
    return {f"{name}{which}": values for name in names for which, values in _MAKERS[name](seen).items()}


def class_names(network: Network) -> tuple[str, ...]:
    """A name for every class that no other has: "crane (134)", with its index, where two are called alike."""
    names = network.class_names or tuple(map(str, range(network.config.num_classes)))
    counts = Counter(names)
    return tuple(f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names))


# Attention of the tokens that are read


def token_attention(seen: Seen) -> dict[str, Tensor]:
    """By layer, how the prefix tokens attend to the patches: (prefix, heads, grid height, grid width).

    Layers of the trunk before the tokens join it are left out.
    """
    prefix, height, width = seen.layout
    rows = {}
    for name, weights in seen.attention.items():
        stage, block = name.split(".")[:2]
        joined = seen.network.join_at is not None and int(block) >= seen.network.join_at
        if prefix and (stage == "pool" or joined):
            patches = weights[:, :prefix, -height * width :]  # keys: prefix tokens, where they are keys, then patches
            rows[name] = patches.unflatten(-1, (height, width)).transpose(0, 1)
    return rows


def head_maps(seen: Seen) -> dict[str, Tensor]:
    """Every head of every layer in which a token reads the patches, (heads, grid height, grid width).

    The second token's are "LAYER: distillation"; with one query a class they are "LAYER: CLASS" for the shown classes.
    """
    found: dict[str, Tensor] = {}
    for layer, rows in token_attention(seen).items():
        if seen.network.per_class:
            names = class_names(seen.network)
            found |= {f"{layer}: {names[i]}": rows[i] for i in seen.shown}
        else:
            found |= {f"{layer}{_suffix(i)}": row for i, row in enumerate(rows)}
    return found


def _suffix(token: int) -> str:
    return f": {TOKENS[token]}" if token else ""


def _class_attention(seen: Seen) -> dict[str, Tensor]:
    """The mean over heads of the last block of a ViT, or of CaiT's first class-attention layer: that one looks at the
    object, the second one at the whole image (CaiT 4.2, D.1)."""
    rows = token_attention(seen)
    last = f"blocks.{len(seen.network.blocks) - 1}."
    telling = [rows[name] for name in rows if name.startswith("pool.0." if seen.network.join_at is None else last)]
    mean = torch.stack(telling).mean(dim=(0, 2))  # over branches and heads
    return {_suffix(i): values for i, values in enumerate(mean)}


def _pooling(seen: Seen) -> dict[str, Tensor]:
    return {"": next(iter(token_attention(seen).values()))[0].mean(dim=0)}


def _per_class(seen: Seen) -> dict[str, Tensor]:
    names, rows = class_names(seen.network), next(iter(token_attention(seen).values()))
    return {f": {names[i]}": rows[i].mean(dim=0) for i in seen.shown}


# Attention through all layers


def _rollout(seen: Seen) -> dict[str, Tensor]:
    """How much of each patch reaches the tokens that are read, were attention and shortcut all there is: the product
    over the blocks of (1 + the sum over branches of A) / (1 + branches), A averaged over heads (Abnar and Zuidema)."""
    prefix, height, width = seen.layout
    flow = torch.eye(height * width, device=seen.x.device)
    for i in range(len(seen.network.blocks)):
        if i == seen.network.join_at:
            flow = torch.block_diag(torch.eye(prefix, device=flow.device), flow)
        flow = _mixed(_of_block(seen, f"blocks.{i}."), len(flow)) @ flow
    if seen.network.join_at is None and prefix:
        flow = torch.block_diag(torch.eye(prefix, device=flow.device), flow)
        for i in range(len(seen.network.pool)):
            flow = _mixed(_of_block(seen, f"pool.{i}."), len(flow)) @ flow
    reached = flow[:prefix, prefix:] if prefix else flow.mean(dim=0, keepdim=True)
    return {_suffix(i): row.unflatten(0, (height, width)) for i, row in enumerate(reached)}


def _of_block(seen: Seen, block: str) -> list[Tensor]:
    """The attention of a block's branches, (queries, keys) each, averaged over heads."""
    return [weights.mean(dim=0) for name, weights in seen.attention.items() if name.startswith(block)]


def _mixed(branches: list[Tensor], tokens: int) -> Tensor:
    """(tokens, tokens): what a block makes of each token; tokens that do not ask stay as they are."""
    flow = torch.eye(tokens, device=branches[0].device)
    asking = branches[0].shape[0]
    for weights in branches:
        flow[:asking, -weights.shape[1] :] += weights
    flow[:asking] /= 1 + len(branches)
    return flow


# Mixing by matrices


def _cross_patch(seen: Seen) -> dict[str, Tensor]:
    """How much is read from each patch j, over all blocks: the sum over i of |A_ij| times the length of what patch j
    puts in, times LayerScale's factors. The shift of `post="affine"` is the same for all patches: it is left out."""
    read = torch.zeros(seen.layout.height * seen.layout.width, device=seen.x.device)

    def note(branch: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(branch, Branch)
        assert isinstance(branch.fn, CrossPatchLinear)
        assert isinstance(branch.scale, LayerScale)
        given = (branch.scale.gamma * branch.norm(inputs[1]))[0].norm(dim=-1)
        read.add_(branch.fn.weight.abs().sum(dim=0) * given)

    branches = [module for module in seen.network.blocks.modules() if isinstance(module, Branch)]
    hooks = [branch.register_forward_hook(note) for branch in branches if isinstance(branch.fn, CrossPatchLinear)]
    try:
        with torch.inference_mode():
            seen.network(seen.x)
    finally:
        for hook in hooks:
            hook.remove()
    return {"": read.unflatten(0, (seen.layout.height, seen.layout.width))}


def patch_rows(network: PatchNetwork) -> dict[str, Tensor]:
    """The rows of the matrices over patches, by layer, (rows, grid height, grid width), signed: of the 6 x 6 central
    patches, row-major (thesis Fig. 4.2), and the one row of a class-MLP.

    A side of the grid with fewer than 6 patches gives all of them; where the centre lies between two choices, the upper
    or left one is taken.
    """
    height, width = network.config.grid
    ys, xs = central_patches(height), central_patches(width)
    places = [y * width + x for y in ys for x in xs]
    rows = {}
    for name, module in network.named_modules():
        if isinstance(module, CrossPatchLinear):
            rows[name] = module.weight.detach()[places].unflatten(1, (height, width))
        elif isinstance(module, ClassMLP):
            rows[name] = module.weight.detach()[:, -height * width :].unflatten(1, (height, width))
    return rows


def central_patches(side: int) -> range:
    """The places along a side of the grid whose rows are shown: the central 6, or all of a smaller grid."""
    count = min(CENTRAL, side)
    return range((side - count) // 2, (side - count) // 2 + count)


_MAKERS: dict[str, Callable[[Seen], dict[str, Tensor]]] = {
    "class-attention": _class_attention,
    "rollout": _rollout,
    "pooling": _pooling,
    "per-class": _per_class,
    "cross-patch": _cross_patch,
    "grad-cam": lambda seen: {"": grad_cam(seen.network, seen.x, seen.target)},
    "occlusion": lambda seen: {"": occlusion(seen.network, seen.x, seen.target)},
}
