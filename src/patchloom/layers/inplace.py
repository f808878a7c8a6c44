"""Writing over what nobody will look at again: in inference, fresh memory is what wide activations wait for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


def eager_inference() -> bool:
    """Whether nothing records what is computed: no gradient, no compiler, no tracer."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())


def unseen(layer: nn.Module) -> bool:
    """Whether nobody can see a fresh tensor that `layer` takes or gives being written over.

    So without gradients, outside torch.compile, and with no hook on the layer that may have kept it.
    """
    if not eager_inference():
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks)
    return not any(hooks)


def gelu(x: Tensor, made_by: nn.Module) -> Tensor:
    """The exact (erf) GELU of every published model, of what `made_by` has just put out."""
    return torch.ops.aten.gelu_(x) if unseen(made_by) else F.gelu(x)
