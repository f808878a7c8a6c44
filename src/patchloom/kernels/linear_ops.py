"""Operators of single layers: Linear, FFN, and ResMLP's mixing of patches."""

from __future__ import annotations

from torch import Tensor

from patchloom.kernels.calls import call
from patchloom.kernels.checks import check_dense, check_linear, check_same_type, check_total
from patchloom.kernels.operators import operator, returns_nothing
from patchloom.kernels.packing import panel


@operator(
    "linear(Tensor x, Tensor weight, Tensor bias, int outputs, float eps, bool activate) -> Tensor",
    lambda x, *others: x.new_empty((*x.shape[:-1], others[2])),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor, outputs: int, eps: float, activate: bool) -> Tensor:
    """(..., D) -> (..., outputs): a Linear, of x normalised when eps >= 0, through a GELU when `activate`.

    Args:
        weight, bias: of `pack` or `pack_int8`; `outputs` is the number without padding.
        eps: of a LayerNorm without weights, whose weights are folded into the Linear; negative for none.
    """
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    inputs = x.shape[-1]
    int8 = check_linear(weight, bias, inputs, outputs)
    rows, panels = x.numel() // inputs, weight.data_ptr()
    # The last flags: activate, add to the output, int8.
    call("linear", x, out, rows, panels, bias, inputs, outputs, eps, activate, False, int8)
    return out


@operator("linear_(Tensor(a!) total, Tensor x, Tensor weight, Tensor bias, Tensor? gate) -> ()", returns_nothing)
def linear_(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None) -> None:
    """total (..., outputs) += a Linear of x (..., D), of gate * x when there is a gate (B, D)."""
    x = x.contiguous()
    inputs, outputs = x.shape[-1], total.shape[-1]
    rows = x.numel() // inputs
    check_total(total, (*x.shape[:-1], outputs))
    int8 = check_linear(weight, bias, inputs, outputs)
    if gate is None:
        call("linear", x, total, rows, weight.data_ptr(), bias, inputs, outputs, -1.0, False, True, int8)
    else:
        # One gate per image applies to all of its tokens.
        gate, tokens, panels = gate.contiguous(), rows // max(len(x), 1), weight.data_ptr()
        check_dense("gates", gate, (len(x), inputs))
        call("gated_linear", x, gate, total, rows, tokens, panels, bias, inputs, outputs, int8)


@operator(
    "ffn_(Tensor(a!) total, Tensor? x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, int hidden, "
    "float eps) -> ()",
    returns_nothing,
)
def ffn_(
    total: Tensor,
    x: Tensor | None,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    hidden: int,
    eps: float,
) -> None:
    """total (..., D) += fc2(GELU(fc1(x))), x normalised first when eps >= 0; without x, of total itself."""
    x = total if x is None else x.contiguous()
    dim = x.shape[-1]
    check_total(total, x.shape)
    int8 = check_same_type([check_linear(weight1, bias1, dim, hidden), check_linear(weight2, bias2, hidden, dim)])
    rows, panels1, panels2 = x.numel() // dim, weight1.data_ptr(), weight2.data_ptr()
    call("ffn", x, total, rows, dim, hidden, panels1, bias1, panels2, bias2, eps, int8)


@operator("cross_patch_(Tensor(a!) x, Tensor weight, Tensor channels, Tensor patches) -> ()", returns_nothing)
def cross_patch_(x: Tensor, weight: Tensor, channels: Tensor, patches: Tensor) -> None:
    """x (B, N, D) += ResMLP's mixing: scale * (weight @ x) + rows * across + shift * gain.

    `channels` (3, D) has scale, across and gain, each padded to a panel; `patches` (2, N) has rows and shift.

    Args:
        weight: (N, N), not packed: row i has the weights of the patches that patch i reads.
    """
    _, tokens, dim = x.shape
    check_total(x, x.shape)
    check_dense("weights", weight, (tokens, tokens))
    check_dense("channels", channels, (3, -(-dim // panel()) * panel()))
    check_dense("patches", patches, (2, tokens))
    call("cross_patch", x, tuple(x.shape), weight, channels, patches)
