"""What each parameter is for: asked by weight-decay exclusions, partial fine-tuning, deltas and reports."""

from __future__ import annotations

from torch import nn

from patchloom.models.network import unwrapped

ROLES = ("stem", "position", "token", "attention", "mixing", "ffn", "norm", "scale", "pool", "head")

_NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """The role of every parameter, by name: stem position token attention mixing ffn norm scale pool head.

    A layer declares its role; the outermost declaration on the way from the network to the parameter counts, so the
    norms inside a stem are "stem".
    """
    network = unwrapped(model)
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
