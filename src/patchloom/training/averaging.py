"""An exponential moving average of the weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Average:
    """average <- d average + (1 - d) weights after every update; buffers (statistics of BatchNorm) are copied.

    With `warmup` d is at most (1 + t) / (10 + t) at update t, so that a short run is not still at its random start.

    Args:
        model: the module to follow; a copy of it becomes `self.model`, in evaluation mode and without gradients.
        decay: d, close to 1; 0.9999 averages over about the last 10,000 updates.
    """

    def __init__(self, model: Any, decay: float, warmup: bool = True) -> None:
        self.model: Any = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.warmup = decay, warmup

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """After update number `updates` (from 1 on)."""
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        # One fused call for all parameters: mine + (1 - d) (theirs - mine).
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        # Running statistics are averages already, and counters of batches are integers that cannot be averaged.
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
