"""Conditions for two shortcuts: overwriting an activation, and computing from a layer's weights without calling it.

In inference, allocating memory for wide activations takes longer than computing them, so layers write in place where
nothing else can observe it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks  # the module that holds hooks registered for all modules


def eager_inference() -> bool:
    """Whether operations are only executed, not recorded: no autograd, no compiler, no tracer."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())


def may_overwrite(layer: nn.Module) -> bool:
    """Whether a new tensor that `layer` receives or returns can be overwritten unnoticed.

    True without gradients, outside torch.compile, and if no module in the layer has a hook that may have kept it.
    """
    return eager_inference() and not any(hooked(module) for module in layer.modules())


def replaceable(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether computing from a layer's weights equals calling it.

    True for exactly `kind`, not a subclass (such as a quantised, adapted or parametrised replacement), without hooks
    and without a `forward` set on the instance.
    """
    return type(layer) is kind and not hooked(layer) and "forward" not in vars(layer)


def hooked(layer: nn.Module) -> bool:
    """Whether a forward or backward hook, on the layer or on all modules, observes its inputs or outputs."""
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        or global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
    )  # fmt: skip


def drop(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout in training; otherwise x itself, so that a traced or exported graph contains no dropout."""
    return F.dropout(x, rate) if training and rate else x


def gelu(x: Tensor, made_by: nn.Module) -> Tensor:
    """The exact (erf) GELU, which every published model uses, of x, the output of `made_by`."""
    return activate(x, made_by, "gelu")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {name: getattr(torch.ops.aten, f"{name}_") for name in ACTIVATIONS}


def activate(x: Tensor, made_by: nn.Module, kind: str) -> Tensor:
    """Apply the activation `kind` to x, the output of `made_by`. In inference x is overwritten."""
    in_place = may_overwrite(made_by) and _known_layer(made_by)
    return (IN_PLACE if in_place else ACTIVATIONS)[kind](x)


def _known_layer(layer: nn.Module) -> bool:
    """Whether a layer is torch's or patchloom's own, which keep no reference to their output; others may."""
    return type(layer).__module__.startswith(("torch.nn.", "patchloom.")) and "forward" not in vars(layer)
