"""What each parameter is for: asked by weight-decay exclusions, partial fine-tuning, deltas and reports."""

from __future__ import annotations

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.layers.attention import Attention
from patchloom.models.network import unwrapped

ROLES = ("stem", "position", "token", "attention", "mixing", "ffn", "norm", "scale", "gate", "pool", "head")

TUNINGS = ("all", "attention", "ffn", "head")  # what fine-tuning may leave trainable
_NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """The role of every parameter, by name: stem position token attention mixing ffn norm scale gate pool head.

    A layer declares its role; the outermost declaration on the way from the network to the parameter counts, so the
    norms inside a stem are "stem".
    """
    network = model if hasattr(model, "ROLES") else unwrapped(model)
    roles = {id(parameter): _role(network, name) for name, parameter in network.named_parameters()}
    return {name: roles[id(parameter)] for name, parameter in model.named_parameters()}


def _role(model: nn.Module, name: str) -> str:
    path = name.split(".")
    if role := getattr(model, "ROLES", {}).get(path[0]):
        return role
    module = model
    for step in path[:-1]:
        module = getattr(module, step)
        if role := "norm" if isinstance(module, _NORMS) else getattr(module, "role", None):
            return role
    raise LookupError(f"no layer on the way to {name} declares a role")


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
        raise PatchloomError(
            f"{unwrapped(model).config.name} has no {tune} to tune: choose {', '.join(['all', *has, 'head'])}."
        )
    return heads | branches | {name for name, role in roles.items() if role == "position"}
