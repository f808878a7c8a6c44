"""When a layer may take a short cut: write over what nobody will look at again, compute from the weights of another.

In inference, fresh memory is what wide activations wait for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as of_all  # it has the hooks on every module


def eager_inference() -> bool:
    """Whether nothing records what is computed: no gradient, no compiler, no tracer."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())


def unseen(layer: nn.Module) -> bool:
    """Whether nobody can see a fresh tensor that `layer` takes or gives being written over.

    So without gradients, outside torch.compile, and with no hook on the layer that may have kept it.
    """
    return eager_inference() and not any(hooked(module) for module in layer.modules())


def replaceable(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether computing from a layer's weights is the same as calling it: it is plain, not a quantised, adapted or
    parametrised stand-in, and has no hook and no forward of its own."""
    return type(layer) is kind and not hooked(layer) and "forward" not in vars(layer)


def hooked(layer: nn.Module) -> bool:
    """Whether somebody looks at what the layer takes or gives, on the way forth or back."""
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        or of_all._global_forward_hooks or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks or of_all._global_backward_pre_hooks
    )  # fmt: skip


def drop(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout in training; x itself otherwise, so that a traced or exported graph has no dropout."""
    return F.dropout(x, rate) if training and rate else x


def gelu(x: Tensor, made_by: nn.Module) -> Tensor:
    """The exact (erf) GELU of every published model, of what `made_by` has just put out."""
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
    return (IN_PLACE if unseen(made_by) and _of_the_house(made_by) else ACTIVATIONS)[kind](x)


def _of_the_house(layer: nn.Module) -> bool:
    """Whether a layer is known to keep nothing of what it gives out, as a stand-in may."""
    return type(layer).__module__.startswith(("torch.nn.", "patchloom.")) and "forward" not in vars(layer)
