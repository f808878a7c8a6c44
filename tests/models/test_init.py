"""Fresh networks start as the published code does."""

from __future__ import annotations

import json
import re

import pytest
import torch

import patchloom
from conftest import REFERENCE, stir
from patchloom.layers.ffn import FFN
from patchloom.weights.layouts import from_ours

RECORDED = json.loads((REFERENCE / "init_stats.json").read_text())
NAMES = {  # recorded -> ours, with the options that the recording's constructor has
    "deit_tiny_patch16_224": ("deit_tiny", {}),
    "deit_tiny_distilled_patch16_224": ("deit_tiny_distilled", {}),
    "cait_XXS24_224": ("cait_xxs24", {}),
    "resmlp_12": ("resmlp_s12", {}),
    "deit_small_patch16_LS": ("deit3_small", {}),
    "deit_small_patch16_18x2": ("vit_small_18x2", {}),
    "patchconvnet_S60": ("patchconvnet_s60", {}),
    "patchconvnet_S60_multi": ("patchconvnet_s60", {"queries": "per_class"}),
}


@pytest.mark.parametrize("theirs", RECORDED["models"])
def test_statistics_equal_the_recorded_ones(theirs: str) -> None:
    name, options = NAMES[theirs]
    model = patchloom.create_model(name, **options)
    groups: dict[str, list[torch.Tensor]] = {}
    for key, tensor in from_ours(model.state_dict(), model.config, "official").items():
        groups.setdefault(re.sub(r"(blocks|blocks_token_only|head)\.\d+\.", r"\1.N.", key), []).append(tensor.flatten())
    recorded = RECORDED["models"][theirs]
    assert set(recorded) <= set(groups)
    for key, want in recorded.items():
        got = torch.cat(groups[key])
        assert got.numel() == want["count"], key
        wide = 5 * max(want["std"], 1e-9) / want["count"] ** 0.5
        assert abs(float(got.mean()) - want["mean"]) <= 2 * wide + 1e-6 * abs(want["mean"]) + 1e-9, key
        assert abs(float(got.std(correction=0)) - want["std"]) <= wide + 1e-6, key


@pytest.mark.parametrize(
    ("name", "value"),
    [("cait_xxs24", 1e-5), ("cait_xxs36", 1e-6), ("cait_b12", 0.1), ("resmlp_s12", 0.1), ("resmlp_s24", 1e-5),
     ("resmlp_s36", 1e-6), ("resmlp_b24", 1e-6), ("deit3_tiny", 1e-4), ("patchconvnet_s20", 1e-4),
     ("patchconvnet_s120", 1e-6)],
)  # fmt: skip
def test_scale_starts_at_the_published_value(name: str, value: float) -> None:
    with torch.device("cpu"):
        narrow = {"dim": 392 if "_b24" in name else 48}  # wider than S: its start follows the width
        options = narrow if "resmlp" in name else {**narrow, "heads": 1}
        model = patchloom.create_model(name, num_classes=2, **options)
    gammas = [p for key, p in model.named_parameters() if key.endswith("gamma")]
    assert gammas
    assert all(bool((p == torch.tensor(value)).all()) for p in gammas)


def test_fixup_starts_branches_and_head_at_zero_and_scales_what_is_before() -> None:
    model = patchloom.create_model("deit_nano", num_classes=5, scale="fixup")
    plain = patchloom.create_model("deit_nano", num_classes=5)
    assert not model.head.weight.any()
    for block in model.blocks:
        assert not block.mixing.branches[0].fn.proj.weight.any()
        assert not block.ffn.branches[0].fn.fc2.weight.any()
        assert block.ffn.branches[0].scale.alpha.item() == 1
    ratio = model.blocks[0].ffn.branches[0].fn.fc1.weight.std() / plain.blocks[0].ffn.branches[0].fn.fc1.weight.std()
    assert ratio.item() == pytest.approx((2 * model.config.depth) ** -0.5, rel=0.05)


def test_t_fixup_scales_values_outputs_and_ffn() -> None:
    model = patchloom.create_model("deit_nano", num_classes=5, scale="t-fixup")
    dim, factor = model.config.dim, 0.67 * model.config.depth**-0.25
    xavier = (2 / (2 * dim)) ** 0.5
    attention = model.blocks[0].mixing.branches[0].fn
    q, k, v = (part.std().item() for part in attention.qkv.weight.chunk(3))
    assert q == pytest.approx(xavier, rel=0.05)
    assert k == pytest.approx(xavier, rel=0.05)
    assert v == pytest.approx(xavier * factor, rel=0.05)
    assert attention.proj.weight.std().item() == pytest.approx(xavier * factor, rel=0.05)
    fc1 = next(m for m in model.modules() if isinstance(m, FFN)).fc1.weight
    assert fc1.std().item() == pytest.approx((2 / (5 * dim)) ** 0.5 * factor, rel=0.05)


def test_a_scale_starts_at_its_own_value_whatever_the_family() -> None:
    for name in ("deit_nano", "deit3_nano", "vit_tiny_2x1"):
        rezero = patchloom.create_model(name, num_classes=2, scale="rezero")
        assert {p.item() for key, p in rezero.named_parameters() if key.endswith("scale.alpha")} == {0.0}
        fixup = patchloom.create_model(name, num_classes=2, scale="fixup", distilled=True)
        assert {p.item() for key, p in fixup.named_parameters() if key.endswith("scale.alpha")} == {1.0}
        assert not fixup.head_distill.weight.any()
        epsilon = patchloom.create_model(name, num_classes=2, scale="rezero", scale_value=0.25)
        assert {p.item() for key, p in epsilon.named_parameters() if key.endswith("scale.alpha")} == {0.25}


def test_published_forms_have_no_pre_norm() -> None:
    for scale in ("rezero", "skipinit", "fixup", "t-fixup"):
        amended = patchloom.create_model("deit_nano", num_classes=5, scale=scale)
        published = patchloom.create_model("deit_nano", num_classes=5, scale=scale, scale_form="published")
        missing = set(amended.state_dict()) - set(published.state_dict())
        assert missing == {key for key in amended.state_dict() if ".branches.0.norm." in key}


def test_fixup_has_a_bias_after_a_branch_only_where_no_norm_removes_it() -> None:
    for form, effect in (("amended", False), ("published", True)):
        model = patchloom.create_model("deit_nano", num_classes=5, scale="fixup", scale_form=form).eval()
        stir(model)
        biases = [p for key, p in model.named_parameters() if key.endswith("scale.bias")]
        assert bool(biases) is effect
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        biases[0] += 1
        assert not torch.allclose(model(images), before, atol=1e-3)
