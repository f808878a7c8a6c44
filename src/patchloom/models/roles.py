"""What each parameter is for, of any module: asked by weight decay, partial fine-tuning, layer-wise learning rates,
deltas and reports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.layers.attention import Attention

ROLES = ("stem", "position", "token", "attention", "mixing", "ffn", "norm", "scale", "gate", "pool", "head", "other")

TUNINGS = ("all", "attention", "ffn", "head")  # what fine-tuning may leave trainable
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_HEADS = ("head", "fc", "classifier")  # what classifiers are called in timm and torchvision
_BLOCKS = ("blocks", "layers", "stages")  # what a stack of blocks is called


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
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    # A wrapper has nothing of its own, neither parameters nor a second child.
    alone = len(children) == 1 and next(module.parameters(recurse=False), None) is None
    return children[0] if alone and not hasattr(module, "get_classifier") else None


def layer_depths(module: nn.Module) -> dict[str, int]:
    """The depth of every parameter of any module, by name, for a learning rate that decays from the last layer down.

    Of a stack of L blocks (a child called blocks, layers or stages): 0 for what comes before it (stem, tokens,
    positions), i + 1 for block i, L + 1 for what comes after (pool, norm, head). Of another module: the order of its
    children, parameters of its own at 0. In an nn.ModuleDict every module ends at the depth of the deepest one, so that
    heads beside a trunk are on a par with its last layer.

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
    starts = _depths_of_children(module)
    return {name: _depth(name.split("."), starts) for name, _ in module.named_parameters()}


def _depths_of_children(module: nn.Module) -> dict[str, int]:
    """The depth of each child with parameters; of a stack, that of its first block."""
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    stack = next((name for name in _BLOCKS if len(list(children.get(name, nn.Identity()).children())) > 1), None)
    if stack is None:
        return {name: place for place, name in enumerate(children)}
    names = list(children)
    after = 1 + len(list(children[stack].children()))
    before = names[: names.index(stack)]
    depths = {name: 0 if name in before and name not in _HEADS else after for name in names}
    return depths | {f"{stack}.{name}": i + 1 for i, (name, _) in enumerate(children[stack].named_children())}


def _depth(path: list[str], depths: dict[str, int]) -> int:
    return depths.get(".".join(path[:2]), depths.get(path[0], 0) if len(path) > 1 else 0)


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
