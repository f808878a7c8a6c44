"""ResMLP's options of thesis 4.3.4, its closing Aff as printed, and LayerScale's start by width and depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from patchloom.errors import PatchloomError
from patchloom.models.registry import config_from_json, find_config

SMALL: dict[str, Any] = {"num_classes": 4, "img_size": 32, "depth": 2, "scale_value": 0.7}
OPTIONS: list[dict[str, Any]] = [
    *({"activation": word} for word in ("gelu", "relu", "silu", "hardswish")),
    {"activation": "relu", "mixing": "mlp", "aggregation": "class_mlp"},
    {"positions": "patches"},
    {"positions": "patches", "mixing": "depthwise"},
    {"positions": "patches", "aggregation": "class_mlp"},
    {"norm": "batch"},
    {"norm": "batch", "aggregation": "class_mlp"},
    {"post": "affine"},
    {"post": "affine", "norm": "batch", "positions": "patches", "activation": "silu"},
    {"post": "affine", "aggregation": "class_mlp"},
    {"post": "affine", "norm": "layer"},
]


def network(**options: Any) -> nn.Module:
    """A network whose parameters and statistics are all away from their start."""
    torch.manual_seed(1)
    model = patchloom.create_model("resmlp_nano", **{**SMALL, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.2, 0.9)
    model.train()(torch.randn(8, 3, 32, 32))
    return model.eval()


def named(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items())


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_options_work_fused_counted_saved_and_with_roles(options: dict[str, Any], tmp_path) -> None:
    model, images = network(**options), torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        expected = model(images)
        for kernels in (True, False):
            torch.testing.assert_close(patchloom.fuse(model, kernels=kernels)(images), expected, rtol=1e-4, atol=1e-4)
    assert patchloom.complexity(model).params == sum(p.numel() for p in model.parameters())
    roles = patchloom.parameter_roles(model)
    assert all(role == "scale" for name, role in roles.items() if ".scale." in name)
    assert roles.get("positions", "position") == "position"
    patchloom.save(model, tmp_path / "model.safetensors")
    assert torch.equal(patchloom.load(tmp_path / "model.safetensors")(images), expected)
    hints = {name: options[name] for name in ("activation",) if name in options}
    bare = patchloom.load(model.state_dict(), img_size=32, **hints)
    assert bare.config.replace(name="", family="", scale_value=None) == model.config.replace(
        name="", family="", scale_value=None
    )
    assert torch.equal(bare(images), expected)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o != {"activation": "gelu"}], ids=named)
@pytest.mark.parametrize("layout", ["official", "timm"])
def test_published_layouts_refuse_what_they_cannot_express(options: dict[str, Any], layout: str, tmp_path) -> None:
    with pytest.raises(PatchloomError, match=layout):
        patchloom.save(network(**options), tmp_path / "model.safetensors", layout=layout)


def test_network_is_its_equations() -> None:
    """Eq. 4.2 and 4.3 with every option at once, from the parameters alone."""
    model = network(post="affine", positions="patches", activation="hardswish")
    w = dict(model.named_parameters())

    def aff(x: Tensor, at: str) -> Tensor:
        return w[f"{at}.alpha"] * x + w[f"{at}.beta"]

    images = torch.randn(2, 3, 32, 32)
    x = model.stem(images) + w["positions"]
    for i in range(2):
        mix, ffn = f"blocks.{i}.mixing.branches.0", f"blocks.{i}.ffn.branches.0"
        y = torch.einsum("ij,bjd->bid", w[f"{mix}.fn.weight"], aff(x, f"{mix}.norm")) + w[f"{mix}.fn.bias"][:, None]
        x = x + w[f"{mix}.scale.gamma"] * y + w[f"{mix}.scale.beta"]
        y = F.linear(aff(x, f"{ffn}.norm"), w[f"{ffn}.fn.fc1.weight"], w[f"{ffn}.fn.fc1.bias"])
        y = F.linear(F.hardswish(y), w[f"{ffn}.fn.fc2.weight"], w[f"{ffn}.fn.fc2.bias"])
        x = x + w[f"{ffn}.scale.gamma"] * y + w[f"{ffn}.scale.beta"]
    expected = F.linear(aff(x, "norm").mean(1), w["head.weight"], w["head.bias"])
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_activation_is_that_of_the_cross_patch_mlp_too() -> None:
    layer = network(activation="silu", mixing="mlp").blocks[0].mixing.branches[0].fn
    x = torch.randn(2, 64, 96)
    expected = layer.fc2(F.silu(layer.fc1(x.transpose(1, 2)))).transpose(1, 2)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_shift_after_a_branch_starts_at_zero() -> None:
    torch.manual_seed(0)
    plain = patchloom.create_model("resmlp_nano", **SMALL).eval()
    affine = patchloom.create_model("resmlp_nano", post="affine", **SMALL).eval()
    missing = affine.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert len(missing) == 4
    assert all(name.endswith("scale.beta") for name in missing)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(affine(images), plain(images))


def test_int8_with_another_activation_is_near() -> None:
    model, images = network(activation="relu"), torch.randn(2, 3, 32, 32)
    try:
        fused = patchloom.fuse(model, int8=True)
    except PatchloomError as error:
        pytest.skip(str(error))
    with torch.inference_mode():
        expected = model(images)
        assert (fused(images) - expected).abs().max() < 0.1 * expected.abs().max()


def test_positions_are_resized_with_the_matrices(tmp_path) -> None:
    model = network(positions="patches")
    nn.init.constant_(model.positions, 0.3)
    patchloom.save(model, tmp_path / "model.safetensors")
    larger = patchloom.load(tmp_path / "model.safetensors", img_size=48)
    assert larger.positions.shape == (1, 144, 96)
    torch.testing.assert_close(larger.positions, torch.full((1, 144, 96), 0.3))


def test_configs_saved_before_the_options_still_load() -> None:
    new = {"post", "activation", "positions"}
    old = {key: value for key, value in find_config("resmlp_s12").to_json().items() if key not in new}
    assert config_from_json({**old, "scale_value": 0.25}).scale_start == 0.25
    old = find_config("patchconvnet_s60").to_json()
    assert config_from_json({**old, "scale_value": 1e-4}).scale_start == 1e-4


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        ("resmlp_s12", {}, 0.1),
        ("resmlp_s24", {}, 1e-5),
        ("resmlp_s36", {}, 1e-6),
        ("resmlp_b24", {}, 1e-6),  # the authors' code; CaiT's rule by depth gives 1e-5
        ("resmlp_b24", {"dim": 384}, 1e-5),
        ("resmlp_s12", {"depth": 24}, 1e-5),
        ("resmlp_s12", {"scale_value": 0.5, "depth": 24}, 0.5),
        ("patchconvnet_s20", {}, 1e-4),
        ("patchconvnet_s60", {}, 1e-4),
        ("patchconvnet_s60", {"depth": 120}, 1e-6),
        ("patchconvnet_s60", {"dim": 768}, 1e-6),
        ("patchconvnet_s120", {}, 1e-6),
        ("patchconvnet_s120", {"depth": 36}, 1e-4),
        ("patchconvnet_b36", {}, 1e-6),
        ("patchconvnet_l60", {"scale_value": 0.5}, 0.5),
        ("resnet50_attention_pool", {}, 1e-4),
    ],
)
def test_scale_starts_by_width_and_depth_after_overrides(name: str, options: dict[str, Any], start: float) -> None:
    assert find_config(name).replace(**options).scale_start == start


def test_networks_have_the_start_of_their_config() -> None:
    model = patchloom.create_model("patchconvnet_nano", depth=61)
    gammas = [p for name, p in model.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 61 + 2
    assert all(torch.equal(gamma, torch.full_like(gamma, 1e-6)) for gamma in gammas)
    model = patchloom.create_model("resmlp_nano", depth=1, dim=392)
    gammas = [p for name, p in model.named_parameters() if name.endswith("gamma")]
    assert all(torch.equal(gamma, torch.full_like(gamma, 1e-6)) for gamma in gammas)
