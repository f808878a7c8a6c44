"""Optimizers against independent implementations; which parameters decay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import patchloom
from conftest import assert_close
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import find_recipe
from patchloom.training.averaging import Average
from patchloom.training.optimizers import Lamb, make_optimizer, parameter_groups


def test_lamb_equals_timms() -> None:
    from timm.optim import Lamb as TimmLamb

    import patchloom.compat  # noqa: F401 - before timm

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)

    def groups(model: nn.Module) -> list[dict]:
        return [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in model.parameters()]

    pairs = [
        (ours, Lamb(groups(ours), lr=0.02, eps=1e-8, max_grad_norm=1.0)),
        (theirs, TimmLamb(groups(theirs), lr=0.02, eps=1e-8, max_grad_norm=1.0)),
    ]
    for step in range(6):
        x = torch.randn(4, 5) * 10 ** (step - 2)  # both below and above the clip
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("name", ["deit_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano", "deit3_nano"])
def test_decay_is_for_matrices_that_are_no_tokens_or_positions(name: str) -> None:
    model = patchloom.create_model(name, num_classes=5)
    groups = parameter_groups(model, Recipe(name="t", weight_decay=0.3))
    decayed, spared = sorted(groups, key=lambda group: -group["weight_decay"])
    names = {id(p): key for key, p in model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert {group["lr_factor"] for group in groups} == {1.0}
    assert all(p.ndim > 1 for p in decayed["params"])
    for p in spared["params"]:
        assert p.ndim == 1 or names[id(p)] in ("class_token", "distill_token", "positions")
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    model.stem.requires_grad_(False)
    left = parameter_groups(model, Recipe(name="t", lr=1e-3, head_lr=1e-2))
    assert not any(names[id(p)].startswith("stem.") for group in left for p in group["params"])
    for group in left:
        assert group["lr_factor"] == pytest.approx(10 if names[id(group["params"][0])].startswith("head") else 1)


def test_rates_decay_from_the_head_down_to_the_stem() -> None:
    """As in BEiT: layer_decay to the power of the blocks that follow, the head at the full rate."""
    model = nn.ModuleDict({"model": patchloom.create_model("deit_nano", num_classes=5, depth=3)})
    names = {id(p): key.removeprefix("model.") for key, p in model.named_parameters()}
    groups = parameter_groups(model, Recipe(name="t", lr=1e-3, head_lr=2e-3, layer_decay=0.5))
    factors = {names[id(p)]: group["lr_factor"] for group in groups for p in group["params"]}
    assert factors.keys() == set(names.values())
    for name, factor in factors.items():
        first, *rest = name.split(".")
        later = 3 - int(rest[0]) if first == "blocks" else 0 if first in ("norm", "head") else 4
        assert factor == pytest.approx(0.5**later * (2 if first == "head" else 1)), name


@pytest.mark.parametrize(("recipe", "kind"), [("deit", "AdamW"), ("deit3_1k", "Lamb"), ("old_fashioned", "SGD")])
def test_the_recipe_chooses(recipe: str, kind: str) -> None:
    optimizer = make_optimizer(patchloom.create_model("deit_nano"), find_recipe(recipe))
    assert type(optimizer).__name__ == kind
    assert optimizer.param_groups[0]["lr"] == find_recipe(recipe).lr


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, 0.9, warmup=False)
    want = model.weight.detach().clone()
    for step in range(1, 4):
        with torch.no_grad():
            model.weight.add_(1)
        average.update(model, step)
        want = 0.9 * want + 0.1 * model.weight.detach()
    assert_close(average.model.weight, want, 1e-6)
    other = nn.Linear(3, 2)
    early = Average(other, 0.9999)
    early.update(model, 1)
    share = 2 / 11  # (1 + t) / (10 + t)
    assert_close(early.model.weight, share * other.weight.detach() + (1 - share) * model.weight.detach(), 1e-6)


def test_adagrad_and_adam_follow_their_formulas() -> None:
    gradients = [torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])]
    moved = {}
    for name in ("adagrad", "adam"):
        layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(layer.weight)
        recipe = Recipe(name="mine", optimizer=name, lr=0.1, eps=1e-10, betas=(0.9, 0.98), weight_decay=0.0)
        optimizer = make_optimizer(layer, recipe)
        for gradient in gradients:
            layer.weight.grad = gradient.clone()
            optimizer.step()
        moved[name] = layer.weight.detach()
    one, two = gradients
    assert_close(moved["adagrad"], -0.1 * (one.sign() + two / (one**2 + two**2).sqrt()), 1e-6)
    mean = (0.1 * 0.9 * one + 0.1 * two) / (1 - 0.9**2)
    square = (0.02 * 0.98 * one**2 + 0.02 * two**2) / (1 - 0.98**2)
    assert_close(moved["adam"], -0.1 * (one.sign() + mean / square.sqrt()), 1e-6)
