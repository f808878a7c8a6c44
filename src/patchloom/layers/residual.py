"""The residual block that all families share: shortcut(x) + sum over branches of drop(scale(branch(norm(x)))).

In a post-norm residual the branches have no norm, and one norm follows the sum.

Shapes: x is (B, N, D) tokens or (B, height, width, D) maps. With `queries=k` only the first k tokens are updated and
returned, (B, k, D), while a mixing branch still reads all of x. Class-attention uses this, and so does the last block
if only the class token is read. Further keyword arguments are handed to every branch's function: the mask of a
sequence, the tokens that it attends to, a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.scales import Scale


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of a sample with probability `rate` and divides kept ones by 1 - rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def active(self) -> bool:
        """Whether branches are dropped: in training with a positive rate."""
        return self.training and self.rate > 0

    def draw(self, y: Tensor) -> Tensor:
        """Draw the factor of each sample, 0 or 1 / (1 - rate), (B, 1, ...)."""
        keep = 1 - self.rate
        return y.new_empty((y.shape[0],) + (1,) * (y.ndim - 1)).bernoulli_(keep) / keep

    def forward(self, y: Tensor) -> Tensor:
        return y * self.draw(y) if self.active else y

    def extra_repr(self) -> str:
        return f"{self.rate:g}"


class Branch(nn.Module):
    """One residual branch: total + drop(scale(fn(norm(x)))), where `total` is the sum so far.

    On a CPU, samples that stochastic depth drops are not computed at all, unless a BatchNorm needs all of them or the
    plain form is selected. On other devices, counting the kept samples would wait for the device.
    """

    fast = True  # False selects the plain form
    least = 2  # samples from which skipping dropped ones is faster (benchmarks/choices.py)

    def __init__(self, norm: nn.Module, fn: nn.Module, scale: Scale | None = None, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.fn = fn
        self.scale = scale if scale is not None else Scale()
        self.drop_path = DropPath(drop_path)
        self.independent = not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules())

    def forward(self, total: Tensor, x: Tensor, queries: int | None = None, **context: Any) -> Tensor:
        if not self.drop_path.active:
            return self.scale(total, self.update(x, queries, **context))
        # a BatchNorm in the branch would see other statistics if samples were left out
        several = self.fast and self.independent and len(x) >= self.least and not context
        if several and x.is_cpu and not torch.compiler.is_compiling():
            return self.add_kept(total, x, queries)
        return total + self.drop_path(self.scale.of(self.update(x, queries, **context)))

    def update(self, x: Tensor, queries: int | None, **context: Any) -> Tensor:
        """fn(norm(x)), before scaling and dropping."""
        return self.fn(self.norm(x), **context) if queries is None else self.fn(self.norm(x), queries, **context)

    def add_kept(self, total: Tensor, x: Tensor, queries: int | None) -> Tensor:
        """Add the branch with the same random draw as the plain form, computing only the kept samples."""
        factors = self.drop_path.draw(x).flatten()
        kept = factors.nonzero().flatten()
        if not len(kept):
            # compute one sample with factor 0: DDP waits for the gradient of every parameter
            kept = kept.new_zeros(1)
        y = self.scale.of(self.update(x.index_select(0, kept), queries)).to(total.dtype)
        # all kept samples have the same factor, 1 / (1 - rate)
        return total.index_add(0, kept, y, alpha=float(factors[kept[0]]))


class Residual(nn.Module):
    """x + the sum of its branches, all reading the same x (parallel branches: "Three things", section 3).

    `gate` replaces the identity shortcut. `norm` is applied to the sum (post-norm); None leaves the sum as it is.
    """

    def __init__(
        self, branches: Iterable[Branch], gate: nn.Module | None = None, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.gate = gate
        self.norm = norm

    def forward(self, x: Tensor, queries: int | None = None, **context: Any) -> Tensor:
        total = self.add(x, queries, **context)
        return total if self.norm is None else self.norm(total)

    def add(self, x: Tensor, queries: int | None, **context: Any) -> Tensor:
        """The sum of the shortcut and the branches, before the norm."""
        shortcut = x if queries is None else x[:, :queries]
        if self.gate is not None:
            # a gate takes shortcut and update separately, so the branches are summed from zero
            update = torch.zeros_like(shortcut)
            for branch in self.branches:
                update = branch(update, x, queries, **context)
            return self.gate(shortcut, update)
        for branch in self.branches:
            shortcut = branch(shortcut, x, queries, **context)
        return shortcut


class Gate(nn.Module):
    """Shortcuts other than the identity (CaiT Table A.1, after He et al., "Identity mappings", Table 1).

    With g = sigmoid(W x + b):
      constant          x / 2 + F(x) / 2
      exclusive_gate    (1 - g) x + g F(x)
      shortcut_gate     (1 - g) x + F(x)
      linear_shortcut   W x + F(x)
      dropout_shortcut  dropout(x, 1/2) + F(x)
    Learned ones start near the identity: gates with b = -6 (He et al.'s best value), the linear shortcut with W = I.
    """

    role = "gate"  # not "scale", which is exempt from weight decay: W is an ordinary matrix
    KINDS = ("constant", "exclusive_gate", "shortcut_gate", "linear_shortcut", "dropout_shortcut")
    LEARNED = ("exclusive_gate", "shortcut_gate", "linear_shortcut")

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(dim, dim) if kind in self.LEARNED else None

    def init_weights(self) -> None:
        if self.linear is None:
            return
        if self.kind == "linear_shortcut":
            nn.init.eye_(self.linear.weight)
        else:
            nn.init.constant_(self.linear.bias, -6.0)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        if self.kind == "constant":
            return (x + update) / 2
        if self.kind == "dropout_shortcut":
            return F.dropout(x, 0.5, self.training) + update
        assert self.linear is not None
        if self.kind == "linear_shortcut":
            return self.linear(x) + update
        gate = self.linear(x).sigmoid()
        return (1 - gate) * x + (gate * update if self.kind == "exclusive_gate" else update)

    def extra_repr(self) -> str:
        return self.kind


class Block(nn.Module):
    """A mixing residual (across tokens), then an FFN residual (across channels); a family may use only one of them."""

    def __init__(self, mixing: Residual | None, ffn: Residual | None) -> None:
        super().__init__()
        self.mixing = mixing
        self.ffn = ffn

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        if self.mixing is not None:
            x = self.mixing(x, queries)
        if self.ffn is not None:
            x = self.ffn(x)
        return x
