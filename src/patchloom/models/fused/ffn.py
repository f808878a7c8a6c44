"""The FFN of a fused copy: the norm's affine folded into fc1, the residual scale into fc2."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import IN_PLACE
from patchloom.layers.residual import Branch
from patchloom.models.fused.folding import (
    FoldedLinear,
    Form,
    fold_input,
    fold_output,
    matrix_of,
    norm_parts,
    stack_inputs,
    stack_outputs,
)


class FusedFFN(nn.Module):
    """total += scale(fc2(GELU(fc1(norm(x))))); `beside`: parallel FFNs, whose hidden channels stand side by side."""

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__()
        self.kernels = form.kernels
        self.eps = norm_parts(branch.norm)[0]
        parts = [(one, cast(FFN, one.fn)) for one in (branch, *beside)]
        # Parallel FFNs read the same normalised tokens up to their own affine, which fc1 takes over. The hidden
        # channels of all stand in one row, and fc2 of that row is the sum of the branches.
        inputs = [fold_input(*matrix_of(ffn.fc1), *norm_parts(one.norm)[1:]) for one, ffn in parts]
        self.fc1 = FoldedLinear(*stack_inputs(inputs), form)
        self.fc2 = FoldedLinear(*stack_outputs([fold_output(ffn.fc2, one.scale) for one, ffn in parts]), form)

    def weights(self) -> list[Tensor]:
        """As the kernel takes them, in its order."""
        return [*self.fc1.packed(), *self.fc2.packed()]

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if not self.kernels:
            return self.fc2.add_to(total, self.fc1(x, self.eps, activate=True))
        # One call: the kernel keeps the hidden channels of a few tokens in the cache and never writes all of them to
        # memory.
        torch.ops.patchloom.ffn_(total, None if x is total else x, *self.weights(), self.fc1.outputs, self.eps)
        return total


class ActivatedFFN(FusedFFN):
    """total += scale(fc2(activation(fc1(norm(x))))) with another activation than GELU, which no kernel has."""

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__(branch, form, *beside)
        assert isinstance(branch.fn, FFN)
        self.activation = branch.fn.activation

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        return self.fc2.add_to(total, IN_PLACE[self.activation](self.fc1(x, self.eps)))
