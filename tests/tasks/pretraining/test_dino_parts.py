"""The parts of DINO against their formulas: loss, head, centre, teacher, schedules and crops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from patchloom.data import native
from patchloom.data.sources import Item
from patchloom.models.config import Config
from patchloom.models.registry import build, find_config
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.crops import Crop, crop_views, shift_hue
from patchloom.tasks.pretraining.dino import PROJECTOR, STUDENT, TEACHER, Dino, by_size
from patchloom.tasks.pretraining.heads import DinoHead, distillation_loss, entropies
from patchloom.tasks.pretraining.method import Setup


def dino(model: str = "deit_nano", options: dict[str, Any] | None = None, **changes: Any) -> Dino:
    small = {"prototypes": 24, "head_hidden": 16, "head_bottleneck": 8, "local_crops": 2}
    recipe = find_recipe("dino@small").replace(**{**small, **changes})
    sizes = {"depth": 2, "img_size": (32, 32)} | ({} if model == "resmlp_nano" else {"patch_size": 8})
    config = find_config(model).replace(**{**sizes, **(options or {})}).without_head()
    return Dino(Setup(PretrainingConfig("data", None, Config()), recipe, build(config), 10, 100))


def crops(method: Dino, images: int = 4) -> tuple[Tensor, ...]:
    height, width = method.local_size
    sides = [(32, 32)] * 2 + [(height, width)] * method.recipe.local_crops
    return tuple(torch.randint(0, 256, (images, *side, 3), dtype=torch.uint8) for side in sides)


def test_the_loss_is_the_mean_cross_entropy_of_every_crop_with_every_other_global_crop() -> None:
    student = torch.randn(5, 3, 7, dtype=torch.float64)
    teacher = torch.randn(2, 3, 7, dtype=torch.float64).softmax(dim=-1)
    pairs = [
        -(teacher[t] * student[s].log_softmax(dim=-1)).sum(dim=-1) for t in range(2) for s in range(5) if s != t
    ]  # fmt: skip
    torch.testing.assert_close(distillation_loss(student, teacher), torch.stack(pairs).mean(dim=0))


def test_the_head_ends_with_a_weight_normed_layer_of_gain_one() -> None:
    head, x = DinoHead(6, 10, 4, 9), torch.randn(3, 6)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 9, bias=False))
    with torch.no_grad():
        layer.parametrizations.weight.original1.copy_(head.prototypes.weight)
        layer.parametrizations.weight.original0.fill_(1.0)
    wanted = layer(F.normalize(head.mlp(x), dim=-1))
    torch.testing.assert_close(head(x), wanted)
    torch.testing.assert_close(head(x, 0.1), wanted / 0.1)
    assert head(x).abs().max() <= 1 + 1e-6


def test_entropies_tell_both_collapses_from_health() -> None:
    uniform, same, healthy = torch.full((8, 4), 0.25), torch.eye(4)[[1] * 8], torch.eye(4).repeat(2, 1)
    assert entropies(uniform) == pytest.approx((math.log(4), math.log(4)))
    assert entropies(same) == pytest.approx((0, 0), abs=1e-6)
    assert entropies(healthy) == pytest.approx((0, math.log(4)), abs=1e-6)


def test_one_forward_pass_for_each_size_of_crop() -> None:
    method, sizes = dino(local_crops=3), []
    student: Any = method.modules[STUDENT]
    student.stem.register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape)))
    losses = method.losses(crops(method), 0, 0)
    assert sizes == [(8, 3, 32, 32), (12, 3, 16, 16)]
    assert losses["dino"].shape == (4,)


def test_crops_of_a_network_with_one_size_are_enlarged_and_take_one_pass() -> None:
    method = dino("resmlp_nano", local_crops=2)
    assert method.local_size == (32, 32)
    assert [len(group) for group in by_size(crops(method))] == [4]
    assert torch.isfinite(method.losses(crops(method), 0, 0)["dino"]).all()


def test_without_local_crops_the_global_ones_are_compared() -> None:
    method = dino(local_crops=0)
    assert method.losses(crops(method), 0, 0)["dino"].shape == (4,)


def test_the_centre_is_the_running_mean_of_the_teacher_and_changes_after_the_step() -> None:
    method = dino(center_momentum=0.75)
    batch = crops(method)
    method.losses(batch, 0, 0)
    assert torch.equal(method.centre, torch.zeros(24)), "a step may be given up after its losses"
    teacher: Any = method.modules[TEACHER]
    with torch.no_grad():
        from patchloom.data.images import to_input

        images = to_input(torch.cat(batch[:2]), method.setup.trunk.preprocessing)
        outputs = method.modules["teacher_projector"](teacher.embed(images))
    method.after_step(1)
    torch.testing.assert_close(method.centre, 0.25 * outputs.mean(dim=0))


def test_the_centre_of_an_accumulated_step_is_that_of_the_whole() -> None:
    method, batch = dino(), crops(dino(), 6)
    method.losses(batch, 0, 0)
    method.after_step(1)
    whole, method.centre = method.centre, torch.zeros(24)
    other = dino()
    other.modules.load_state_dict(method.modules.state_dict())
    for part in range(2):
        other.losses(tuple(crop[part * 3 : part * 3 + 3] for crop in batch), 0, part)
    other.after_step(1)
    torch.testing.assert_close(other.centre, whole)


def test_the_teacher_follows_with_a_momentum_that_rises_to_one() -> None:
    method = dino(teacher_momentum=0.9, teacher_momentum_end=1.0)
    batch = crops(method)
    slow, fast = (dict(method.modules[name].named_parameters()) for name in (TEACHER, STUDENT))
    name = "blocks.0.channel.branches.0.layer.fc1.weight"
    name = name if name in slow else next(key for key in slow if slow[key].ndim == 2)
    with torch.no_grad():
        fast[name].add_(1.0)
    before = slow[name].clone()
    method.losses(batch, 0, 0)
    method.after_step(1)
    torch.testing.assert_close(slow[name], before + 0.1)
    assert method.momentum.at(50, 100) == pytest.approx(0.95)
    assert method.momentum.at(100, 100) == 1.0
    assert not slow[name].requires_grad


def test_the_teachers_temperature_warms_up() -> None:
    method = dino(teacher_temperature_start=0.04, teacher_temperature=0.07, teacher_warmup_epochs=5.0)
    found = [method.temperature.at(epoch, 10) for epoch in (0, 2.5, 5, 9)]
    assert found == pytest.approx([0.04, 0.055, 0.07, 0.07])


@pytest.mark.parametrize("published", [True, False])
def test_the_last_layer_has_no_gradient_in_the_first_epoch(published: bool) -> None:
    method = dino(freeze_last_layer=1.0 if published else 0.0)
    method.losses(crops(method), 0, 0)["dino"].sum().backward()
    last: Any = method.modules[PROJECTOR].prototypes.weight
    for step, frozen in ((9, published), (10, False)):
        last.grad = torch.ones_like(last)
        method.after_backward(step)
        assert (last.grad is None) == frozen


@pytest.mark.parametrize("fast", [True, False])
def test_crops_have_their_sizes_and_depend_on_the_seed_alone(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(native, "available", lambda: False)
    recipe = find_recipe("dino").replace(local_crops=3)
    noise = np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    transform = crop_views(recipe, (32, 32), (16, 16), flips=True)
    first, again, other = (transform(image, Item("a"), seed) for seed in (1, 1, 2))
    assert [crop.shape for crop in first] == [(32, 32, 3)] * 2 + [(16, 16, 3)] * 3
    assert all(crop.dtype == np.uint8 for crop in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[2], first[3])
    assert np.array_equal(np.asarray(image), noise), "the picture is read by every crop"


def test_both_forms_of_a_crop_give_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("no C++ steps here")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8))
    crop = Crop(scale=(0.3, 0.9), flip=0.5, jitter=(0.4, 0.2, 0.1), gray=0.2, blurred=0.5, blur=2.0, solarize=0.2)
    fast = [np.asarray(crop(image, (32, 32), seed)) for seed in range(20)]
    monkeypatch.setattr(native, "available", lambda: False)
    for seed, pixels in enumerate(fast):
        plain = np.asarray(crop(image, (32, 32), seed))
        assert np.abs(plain.astype(int) - pixels).max() <= 1


def test_areas_of_crops_are_those_of_the_scale() -> None:
    # the area is read off a ramp whose values are the places of its pixels
    side = 200
    ramp = np.broadcast_to(np.linspace(0, 255, side)[None, :, None], (side, side, 3)).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(ramp))
    crop = Crop(scale=(0.1, 0.3), flip=0.0, jitter=(0.0, 0.0, 0.0), gray=0.0, blurred=0.0, blur=0.0, solarize=0.0)
    widths = [np.ptp(np.asarray(crop(image, (32, 32), seed)).astype(int)) / 255 for seed in range(200)]
    assert min(widths) > (0.1 * 3 / 4) ** 0.5 - 0.05
    assert max(widths) < (0.3 * 4 / 3) ** 0.5 + 0.05


def test_a_hue_goes_round_and_leaves_grey_alone() -> None:
    red, grey = (Image.new("RGB", (2, 2), colour) for colour in ((255, 0, 0), (90, 90, 90)))
    assert np.asarray(shift_hue(red, 1 / 3))[0, 0].argmax() == 1
    assert np.asarray(shift_hue(red, -1 / 3))[0, 0].argmax() == 2
    assert np.array_equal(np.asarray(shift_hue(red, 1.0)), np.asarray(red))
    assert np.array_equal(np.asarray(shift_hue(grey, 0.4)), np.asarray(grey))


@pytest.mark.parametrize("family", ["deit3_nano", "cait_nano", "patchconvnet_nano", "resmlp_nano", "deit_nano"])
def test_every_family_learns_with_gradients_for_every_trained_parameter(family: str) -> None:
    options = {"norm": "batch"} if family == "patchconvnet_nano" else {}
    method = dino(family, {"patch_size": 8 if family != "resmlp_nano" else 4, **options})
    for name in (STUDENT, PROJECTOR):
        method.modules[name].train()
    method.losses(crops(method), 0, 0)["dino"].sum().backward()
    without = [
        name for part in (STUDENT, PROJECTOR) for name, p in method.modules[part].named_parameters() if p.grad is None
    ]
    assert without == []
    assert all(p.grad is None for p in method.modules[TEACHER].parameters())


def test_published_values_of_the_recipe_have_sources() -> None:
    recipe = patchloom.recipes.registry.find_recipe("dino")  # type: ignore[attr-defined]
    assert (recipe.prototypes, recipe.weight_decay_end, recipe.teacher_momentum) == (65_536, 0.4, 0.996)
    assert all(recipe.sources.get(name) for name in ("lr", "local_crops", "freeze_last_layer", "teacher_temperature"))
