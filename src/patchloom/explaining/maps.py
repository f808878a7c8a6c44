"""Maps of one image on the grid of patches, from the attention or the weights of the network itself.

Shapes: a map is (grid height, grid width); attention is (heads, queries, keys); P prefix tokens come before N patches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError, check_choice
from patchloom.explaining.baselines import grad_cam, occlusion
from patchloom.layers.attention import Attention, ClassAttention, capture_attention
from patchloom.layers.mixing import ClassMLP, CrossPatchLinear
from patchloom.layers.residual import Branch
from patchloom.layers.scales import LayerScale
from patchloom.models.class_names import names_or_indices
from patchloom.models.features import TokenLayout
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork, patch_network

MAPS = ("class-attention", "rollout", "pooling", "per-class", "cross-patch", "grad-cam", "occlusion")
TOKENS = ("class", "distillation")
CENTRAL = 6  # patches along a side whose rows are shown (thesis Fig. 4.2)


@dataclass(frozen=True)
class Outputs:
    """One image and the outputs of a network for it, from which maps are made."""

    network: PatchNetwork
    x: Tensor  # (1, C, height, width), normalised
    layout: TokenLayout
    logits: Tensor  # (classes,)
    attention: dict[str, Tensor]  # by layer, (heads, queries, keys), after softmax
    shown: tuple[int, ...]  # the classes that get a map of their own, best first
    target: int  # the class that grad-cam and occlusion explain


def forward_with_attention(network: Network, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits (classes,) of one image, by the fast form, and its attention (heads, queries, keys) by layer.

    Two forward passes, so that the logits are exactly those of `predict`.

    The fast form of attention never has its matrix in memory; only the second pass computes it.
    """
    with torch.inference_mode():
        logits = network(x)
        with capture_attention(network) as captured:
            network(x)
    assert isinstance(logits, Tensor)
    return logits[0].float(), {name: weights[0].float() for name, weights in captured.items()}


def available_maps(network: Network) -> tuple[str, ...]:
    """The maps that a network supports: those of its architecture, then those of every network.

    Every image classifier of ours has grad-cam and occlusion.
    """
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
    """The requested maps without repetition, by default all; raises PatchloomError for those that are not supported."""
    possible, names = available_maps(patch_network(network)), (names,) if isinstance(names, str) else names
    for name in names or ():
        check_choice("--map", name, MAPS)
        if name not in possible:
            raise PatchloomError(
                f"{network.config.name} does not support the map {name!r}. Choose from: {', '.join(possible)}."
            )
    return possible if names is None else tuple(dict.fromkeys(names))


def make_maps(outputs: Outputs, names: Sequence[str]) -> dict[str, Tensor]:
    """Maps (grid height, grid width) by name; maps of the distillation token or of a class are named "NAME: WHICH"."""
    return {f"{name}{which}": values for name in names for which, values in _MAKERS[name](outputs).items()}


def class_names(network: Network) -> tuple[str, ...]:
    """A unique name for every class: the index is added to names that occur twice, as in "crane (134)"."""
    names = names_or_indices(network.class_names, network.config.num_classes)
    counts = Counter(names)
    return tuple(f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names))


# Attention of the class and distillation tokens


def token_attention(outputs: Outputs) -> dict[str, Tensor]:
    """The attention of the prefix tokens to the patches, by layer: (prefix, heads, grid height, grid width).

    Layers before the tokens join the trunk are left out.
    """
    prefix, height, width = outputs.layout
    rows = {}
    for name, weights in outputs.attention.items():
        stage, block = name.split(".")[:2]
        joined = outputs.network.join_at is not None and int(block) >= outputs.network.join_at
        if prefix and (stage == "pool" or joined):
            patches = weights[:, :prefix, -height * width :]  # the keys end with the patches
            rows[name] = patches.unflatten(-1, (height, width)).transpose(0, 1)
    return rows


def head_maps(outputs: Outputs) -> dict[str, Tensor]:
    """All heads of all layers in which a token attends to patches, (heads, grid height, grid width) each.

    Those of the second token are "LAYER: distillation"; with one query per class they are "LAYER: CLASS" for the shown
    classes.
    """
    found: dict[str, Tensor] = {}
    for layer, rows in token_attention(outputs).items():
        if outputs.network.per_class:
            names = class_names(outputs.network)
            found |= {f"{layer}: {names[i]}": rows[i] for i in outputs.shown}
        else:
            found |= {f"{layer}{_suffix(i)}": row for i, row in enumerate(rows)}
    return found


def _suffix(token: int) -> str:
    return f": {TOKENS[token]}" if token else ""


def _class_attention(outputs: Outputs) -> dict[str, Tensor]:
    """The mean over heads in the last block of a ViT, or in CaiT's first class-attention layer: that one attends to
    the object, the second one to the whole image (CaiT 4.2, D.1)."""
    rows = token_attention(outputs)
    last = f"blocks.{len(outputs.network.blocks) - 1}."
    chosen = [rows[name] for name in rows if name.startswith("pool.0." if outputs.network.join_at is None else last)]
    mean = torch.stack(chosen).mean(dim=(0, 2))  # over branches and heads
    return {_suffix(i): values for i, values in enumerate(mean)}


def _pooling(outputs: Outputs) -> dict[str, Tensor]:
    """The mean over heads of the attention pooling of PatchConvNet."""
    return {"": next(iter(token_attention(outputs).values()))[0].mean(dim=0)}


def _per_class(outputs: Outputs) -> dict[str, Tensor]:
    """The mean over heads of the pooling query of each shown class."""
    names, rows = class_names(outputs.network), next(iter(token_attention(outputs).values()))
    return {f": {names[i]}": rows[i].mean(dim=0) for i in outputs.shown}


# Attention through all layers


def _rollout(outputs: Outputs) -> dict[str, Tensor]:
    """Attention rollout (Abnar and Zuidema): the flow from each patch to the class token by attention and shortcuts,
    the product over blocks of (I + sum over branches of A) / (1 + branches), with A averaged over heads."""
    prefix, height, width = outputs.layout
    flow = torch.eye(height * width, device=outputs.x.device)
    for i in range(len(outputs.network.blocks)):
        if i == outputs.network.join_at:
            # Prefix tokens join here: before, they hold nothing of the patches.
            flow = torch.block_diag(torch.eye(prefix, device=flow.device), flow)
        # Row i of the flow: how much of each input patch has reached token i. Later blocks multiply from the left.
        flow = _mixed(_of_block(outputs, f"blocks.{i}."), len(flow)) @ flow
    if outputs.network.join_at is None and prefix:
        flow = torch.block_diag(torch.eye(prefix, device=flow.device), flow)
        for i in range(len(outputs.network.pool)):
            flow = _mixed(_of_block(outputs, f"pool.{i}."), len(flow)) @ flow
    # Without a prefix token the patches are averaged, and so is the flow.
    reached = flow[:prefix, prefix:] if prefix else flow.mean(dim=0, keepdim=True)
    return {_suffix(i): row.unflatten(0, (height, width)) for i, row in enumerate(reached)}


def _of_block(outputs: Outputs, block: str) -> list[Tensor]:
    """The attention of the branches of a block, averaged over heads, (queries, keys) each."""
    return [weights.mean(dim=0) for name, weights in outputs.attention.items() if name.startswith(block)]


def _mixed(branches: list[Tensor], tokens: int) -> Tensor:
    """The flow through one block, (tokens, tokens); tokens that are not queries are passed on unchanged."""
    flow = torch.eye(tokens, device=branches[0].device)
    queries = branches[0].shape[0]
    for weights in branches:
        # The keys are the last tokens: class-attention without the class token among its keys has fewer of them.
        flow[:queries, -weights.shape[1] :] += weights
    flow[:queries] /= 1 + len(branches)
    return flow


# Mixing by matrices


def _cross_patch(outputs: Outputs) -> dict[str, Tensor]:
    """The contribution of each patch j to all patches i, over all blocks: sum over i of |A_ij| times the norm of the
    input x_j scaled by LayerScale. The shift of `post="affine"` is the same for all patches and is left out."""
    total = torch.zeros(outputs.layout.height * outputs.layout.width, device=outputs.x.device)

    def add(branch: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(branch, Branch)
        assert isinstance(branch.fn, CrossPatchLinear)
        assert isinstance(branch.scale, LayerScale)
        # A hook runs after the forward pass, so the norm is computed once more; `inputs[1]` is what the branch reads.
        norms = (branch.scale.gamma * branch.norm(inputs[1]))[0].norm(dim=-1)
        total.add_(branch.fn.weight.abs().sum(dim=0) * norms)

    branches = [module for module in outputs.network.blocks.modules() if isinstance(module, Branch)]
    hooks = [branch.register_forward_hook(add) for branch in branches if isinstance(branch.fn, CrossPatchLinear)]
    try:
        with torch.inference_mode():
            outputs.network(outputs.x)
    finally:
        for hook in hooks:
            hook.remove()
    return {"": total.unflatten(0, (outputs.layout.height, outputs.layout.width))}


def patch_rows(network: PatchNetwork) -> dict[str, Tensor]:
    """Rows of the cross-patch matrices by layer, (rows, grid height, grid width): those of the 6 x 6 central patches in
    row-major order (thesis Fig. 4.2), and the only row of a class-MLP.

    Grids with fewer than 6 patches along a side use all of them. If the centre is ambiguous, the upper or left choice
    is taken.
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
    """The central 6 positions along a side of the grid, or all of a smaller grid."""
    count = min(CENTRAL, side)
    return range((side - count) // 2, (side - count) // 2 + count)


_MAKERS: dict[str, Callable[[Outputs], dict[str, Tensor]]] = {
    "class-attention": _class_attention,
    "rollout": _rollout,
    "pooling": _pooling,
    "per-class": _per_class,
    "cross-patch": _cross_patch,
    "grad-cam": lambda outputs: {"": grad_cam(outputs.network, outputs.x, outputs.target)},
    "occlusion": lambda outputs: {"": occlusion(outputs.network, outputs.x, outputs.target)},
}
