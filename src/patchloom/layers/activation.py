"""The exact (erf) GELU of every published model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def gelu(x: Tensor, made_by: nn.Module) -> Tensor:
    """GELU of what `made_by` has just put out.

    Written over `x` where nobody could see it: without gradients, outside torch.compile, and with no hook on `made_by`
    that may have kept `x`. A fresh tensor four times as wide as the tokens is what the memory allocator is slowest at.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or made_by._forward_hooks:
        return F.gelu(x)
    return torch.ops.aten.gelu_(x)
