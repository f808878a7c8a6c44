"""What each parameter is for, of any module: asked by weight decay, partial fine-tuning, layer-wise learning rates,
deltas and reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.layers.attention import Attention

ROLES = ("stem", "position", "token", "attention", "mixing", "ffn", "norm", "scale", "gate", "pool", "head", "other")

TUNINGS = ("all", "attention", "ffn", "head")  # what fine-tuning may leave trainable
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_HEADS = ("head", "fc", "classifier")  # what classifiers are called in timm and torchvision
_BLOCKS = ("blocks", "layers", "stages", "features", "encoder", "decoder")  # what a stack of blocks is called
_NUMBERED = re.compile(r"(layer|block|stage|s)\d+")  # or what its blocks are called, where they are not in a list


def parameter_roles(module: nn.Module) -> dict[str, str]:
    """The role of every parameter of any module, by name.

    stem position token attention mixing ffn norm scale gate pool head: declared by the layers of this package; the
    outermost declaration on the path from the module to the parameter counts, so the norms inside a stem are "stem".
    Elsewhere normalisation layers are "norm", a classifier is "head", and what is left is "other". The classifier is
    what timm's `get_classifier` gives, a child called head, fc or classifier, or a last layer that is a Linear. In an
    nn.ModuleDict each module has one of its own.

    Raises PatchloomError for what is not a module.
    """
    _check_module(module)
    # By identity: one module may have several names.
    heads = {id(head) for head in _classifiers(module)}
    return {name: _role(module, name.split("."), heads) for name, _ in module.named_parameters()}


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise PatchloomError(f"Roles are those of the parameters of an nn.Module, not of {type(module).__name__}.")


def _role(module: nn.Module, path: list[str], heads: set[int]) -> str:
    # From the outside to the inside: the first declaration that is met counts.
    for step in path:
        if id(module) in heads:
            return "head"
        declared = "norm" if _is_norm(module) else getattr(module, "role", None)
        declared = getattr(module, "ROLES", {}).get(step, declared)
        if declared in ROLES:  # a user's own layer may have a `role` that means something else
            return declared
        module = getattr(module, step)
    return "other"


def _is_norm(module: nn.Module) -> bool:
    """A norm of torch, or a layer of another library that is called one and has vectors alone."""
    if isinstance(module, _NORMS):
        return True
    return "Norm" in type(module).__name__ and all(p.ndim <= 1 for p in module.parameters())


def _classifiers(module: nn.Module) -> Iterator[nn.Module]:
    """The classifier of a module; of each module in an nn.ModuleDict."""
    if isinstance(module, nn.ModuleDict):
        for part in module.values():
            yield from _classifiers(part)
        return
    inner = _only_child(module)
    if inner is not None:
        yield from _classifiers(inner)
    elif callable(own := getattr(module, "get_classifier", None)):
        found = own()  # of a distilled network, two
        yield from (found if isinstance(found, tuple) else (found,))
    else:
        named = [child for name, child in module.named_children() if name in _HEADS]
        leaves = [leaf for leaf in module.modules() if next(leaf.parameters(recurse=False), None) is not None]
        yield from named or [leaf for leaf in leaves[-1:] if isinstance(leaf, nn.Linear)]


def _only_child(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper: what torch.compile, data-parallel training and weight averaging return."""
    children = list(_trainable_children(module).values())
    # A wrapper has nothing of its own, neither parameters nor a second child.
    alone = len(children) == 1 and next(module.parameters(recurse=False), None) is None
    return children[0] if alone and not hasattr(module, "get_classifier") else None


def layer_depths(module: nn.Module) -> dict[str, int]:
    """The depth of every parameter of any module, by name, for a learning rate that decays from the last layer down.

    Of a stack of L blocks: 0 for what comes before it (stem, tokens, positions), i + 1 for block i, L + 1 for what
    comes after (pool, norm, head). A stack is a list called blocks, layers, stages, features, encoder or decoder, or
    numbered children such as layer1 to layer4, in the module or in a child, such as the trunk of an embedding network.
    Of several, each continues where the one before it ends, and what stands between counts with the next block.
    Without a stack: the order of the children, parameters of the module's own at 0. In an nn.ModuleDict every module
    ends at the depth of the deepest one, so that heads beside a trunk are on a par with its last layer.

    Raises PatchloomError for what is not a module.
    """
    _check_module(module)
    if isinstance(module, nn.ModuleDict):
        parts = {name: layer_depths(part) for name, part in module.items()}
        last = max((max(depths.values(), default=0) for depths in parts.values()), default=0)
        # Aligned at the end, since the last layer of each module keeps the full learning rate.
        shifts = {name: last - max(depths.values(), default=0) for name, depths in parts.items()}
        every = {f"{name}.{key}": depth + shifts[name] for name, part in parts.items() for key, depth in part.items()}
        return {name: every[name] for name, _ in module.named_parameters()}
    inner = _only_child(module)
    if inner is not None and not isinstance(module, nn.Sequential | nn.ModuleList):
        (name,) = (name for name, child in module.named_children() if child is inner)
        return {f"{name}.{key}": depth for key, depth in layer_depths(inner).items()}
    depths = _depths_of_parts(list(_parts(module)))
    return {name: _nearest(name, depths) for name, _ in module.named_parameters()}


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """The names of a module's parts in their order, and whether each is a block of a stack. A child that holds a stack
    somewhere inside is named before its own parts, unless this module has a stack itself."""
    children = _trainable_children(module)
    stacks = {name for name, child in children.items() if _is_stack(name, child)}
    numbered = set() if stacks else _numbered(children)
    for name, child in children.items():
        path = prefix + name
        if name in stacks:
            yield from ((f"{path}.{block}", True) for block in _trainable_children(child))
        else:
            yield path, name in numbered
            if not (stacks or numbered) and _holds_stack(child):
                yield from _parts(child, f"{path}.")


def _depths_of_parts(parts: list[tuple[str, bool]]) -> dict[str, int]:
    if not any(is_block for _, is_block in parts):
        return {path: place for place, (path, _) in enumerate(parts)}
    depths, place = {}, 0
    for path, is_block in parts:
        place = max(place, 1) if is_block else place  # what comes before the first block has 0 to itself
        depths[path] = place
        place += is_block
    # A head may be registered before the blocks.
    return {path: place if path.rpartition(".")[2] in _HEADS else depth for path, depth in depths.items()}


def _nearest(name: str, depths: dict[str, int]) -> int:
    """The depth of the innermost part that holds a parameter; 0 for one of the module's own."""
    while name := name.rpartition(".")[0]:
        if name in depths:
            return depths[name]
    return 0


def _is_stack(name: str, child: nn.Module) -> bool:
    return name in _BLOCKS and isinstance(child, nn.Sequential | nn.ModuleList) and bool(_trainable_children(child))


def _numbered(names: Iterable[str]) -> set[str]:
    """Children that are the blocks of a stack by their numbers: two at least."""
    found = {name for name in names if _NUMBERED.fullmatch(name)}
    return found if len(found) > 1 else set()


def _holds_stack(module: nn.Module) -> bool:
    for child in module.modules():
        names = _trainable_children(child)
        if any(_is_stack(name, part) for name, part in names.items()) or _numbered(names):
            return True
    return False


def _trainable_children(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}


def tuned_parameters(model: nn.Module, tune: str) -> set[str]:
    """The names of the parameters that `tune` trains. "attention": every attention of every branch, class-attention and
    attention pooling among them; "ffn": every FFN; both with the positions and the heads, which "head" trains alone."""
    roles = parameter_roles(model)
    heads = {name for name, role in roles.items() if role == "head"}
    if tune in ("all", "head"):
        return set(roles) if tune == "all" else heads
    if tune == "attention":
        attentions = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Attention))
        branches = {name for name in roles if name.startswith(attentions)}
    else:
        branches = {name for name, role in roles.items() if role == tune}
    if not branches:
        has = [name for name in ("attention", "ffn") if name != tune and name in roles.values()]
        name = getattr(getattr(model, "config", None), "name", type(model).__name__)
        raise PatchloomError(f"{name} has no {tune} to tune: choose {', '.join(['all', *has, 'head'])}.")
    return heads | branches | {name for name, role in roles.items() if role == "position"}
