"""The residual, its scales, gates and stochastic depth, against formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchloom
from conftest import assert_close, stir
from patchloom import layerscale_value, uniform_drop_rate
from patchloom.layers.residual import Branch, DropPath, Gate, Residual
from patchloom.layers.scales import LayerScale


def test_parallel_branches_read_the_same_input_and_are_summed() -> None:
    branches = [Branch(nn.LayerNorm(6), stir(nn.Linear(6, 6)), stir(LayerScale(6, 0.1))) for _ in range(3)]
    residual, x = Residual(branches), torch.randn(2, 4, 6)
    want = x + sum(branch.scale.gamma * branch.fn(branch.norm(x)) for branch in branches)
    assert_close(residual(x), want, 1e-6)


@pytest.mark.parametrize("kind", Gate.KINDS)
def test_gates_follow_their_formulas(kind: str) -> None:
    gate, x, update = stir(Gate(kind, 6)).eval(), torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    g = None if gate.linear is None else torch.sigmoid(gate.linear(x))
    want = {
        "constant": lambda: 0.5 * x + 0.5 * update,
        "exclusive_gate": lambda: (1 - g) * x + g * update,
        "shortcut_gate": lambda: (1 - g) * x + update,
        "linear_shortcut": lambda: gate.linear(x) + update,
        "dropout_shortcut": lambda: x + update,
    }[kind]()
    assert_close(gate(x, update), want, 1e-6)


def test_learned_gates_start_near_the_identity() -> None:
    """He et al.'s best gates start at b = -6; a linear shortcut starts as x itself."""
    model = patchloom.create_model("deit_nano", num_classes=2, scale="exclusive_gate")
    assert {block.ffn.gate.linear.bias[0].item() for block in model.blocks} == {-6.0}
    model = patchloom.create_model("deit_nano", num_classes=2, scale="linear_shortcut")
    assert all(torch.equal(block.mixing.gate.linear.weight, torch.eye(96)) for block in model.blocks)


def test_dropout_shortcut_drops_half_in_training() -> None:
    gate = Gate("dropout_shortcut", 6).train()
    out = gate(torch.ones(1, 5000, 6), torch.zeros(1, 5000, 6))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert abs(float(out.mean()) - 1) < 0.05


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    drop = DropPath(0.3).train()
    out = drop(torch.ones(20000, 2, 3))
    per_sample = out.flatten(1)
    assert bool((per_sample == per_sample[:, :1]).all())
    kept = (per_sample[:, 0] > 0).float().mean()
    assert abs(float(kept) - 0.7) < 0.015
    assert abs(float(out.max()) - 1 / 0.7) < 1e-6
    x = torch.randn(4, 2, 3)
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize("queries", [None, 1])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_computing_only_the_kept_samples_changes_neither_result_nor_gradients(
    rate: float, queries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stir(patchloom.create_model("cait_nano", num_classes=3, img_size=16, depth=2, drop_path=rate)).train()
    branch = (model.blocks if queries is None else model.pool)[0].mixing.branches[0]
    branch.drop_path.rate = rate
    x = torch.randn(7, 17, 96)
    found = []
    for fast in (True, False):
        monkeypatch.setattr(Branch, "fast", fast)
        start = x.clone().requires_grad_()
        torch.manual_seed(3)
        out = branch(start if queries is None else start[:, :1], start, queries)
        gradients = torch.autograd.grad(out.square().sum(), [start, *branch.parameters()])
        found.append([out, *gradients])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, plain, rtol=1e-5, atol=1e-4
        )  # the keys' bias has no effect: noise, no gradient


def test_dropped_samples_are_not_computed_unless_a_batch_norm_sees_them() -> None:
    seen: list[int] = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    for norm in (nn.LayerNorm(4), nn.BatchNorm1d(5)):
        branch, x = Branch(norm, layer, drop_path=0.5).train(), torch.randn(1000, 5, 4)
        branch(x, x)
    assert 440 < seen[0] < 560
    assert seen[1] == 1000


def test_scale_starts() -> None:
    assert bool((LayerScale(64, 0.1).gamma == 0.1).all())
    assert bool((LayerScale(64, 0.1, "zero").gamma == 0).all())
    uniform = LayerScale(100_000, 0.1, "uniform").gamma.detach()
    assert 0 <= float(uniform.min()) < 0.001
    assert 0.199 < float(uniform.max()) <= 0.2
    assert abs(float(uniform.mean()) - 0.1) < 1e-3
    assert not LayerScale(4, 0.1, trainable=False).gamma.requires_grad


def test_depth_rules_give_the_values_of_the_papers() -> None:
    assert [layerscale_value(depth) for depth in (12, 18, 24, 36, 48)] == [0.1, 0.1, 1e-5, 1e-6, 1e-6]  # CaiT 3.5.1
    rates = [uniform_drop_rate(depth) for depth in (12, 18, 24, 36, 48)]  # CaiT Table 3.16, S-24, S-36 and S-48
    assert rates == pytest.approx([0, 0.05, 0.1, 0.2, 0.3])
    assert uniform_drop_rate(6) == 0
