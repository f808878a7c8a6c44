"""Options of vision transformers that no registered model has: dropout, post-norm, stems and learned scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from conftest import assert_close, stir
from patchloom.errors import PatchloomError
from patchloom.layers.scales import ScalarScale
from patchloom.models.registry import config_from_json
from patchloom.recipes.registry import find_recipe
from patchloom.training.optimizers import parameter_groups
from patchloom.weights.layouts import from_ours

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("deit_nano", {"dropout": 0.2}),
    ("deit_nano", {"norm_position": "post"}),
    ("vit_tiny_2x2", {"norm_position": "post", "patch_size": 8}),
    ("cait_nano", {"norm_position": "post"}),
    ("deit_nano", {"stem": "linear_norm"}),
    ("deit_nano", {"stem": "linear_norm", "stem_norm": "layer", "patch_size": 8}),
    ("deit_nano", {"stem": "linear_gelu"}),
    ("deit_nano", {"scale": "epsilon"}),
    ("cait_nano", {"scale": "epsilon"}),
    ("deit_nano", {"scale": "t-fixup", "scale_scalar": True}),
    ("deit_nano", {"scale": "exclusive_gate", "norm_position": "post"}),
]


def make(name: str, **options: Any) -> patchloom.models.network.Network:
    return stir(patchloom.create_model(name, num_classes=5, img_size=32, **{"depth": 2, **options}))


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_counts_roles_and_files_know_the_option(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, images = make(name, **options).eval(), torch.randn(2, 3, 32, 32)
    assert patchloom.complexity(model).params == sum(p.numel() for p in model.parameters())
    assert set(patchloom.parameter_roles(model)) == {key for key, _ in model.named_parameters()}
    assert config_from_json(model.config.to_json()) == model.config
    patchloom.save(model, tmp_path / "weights.safetensors")
    loaded = patchloom.load(tmp_path / "weights.safetensors")
    assert loaded.config == model.config
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize(("name", "options"), OPTIONS[1:7], ids=str)
def test_a_bare_state_dict_tells_norms_and_stem(name: str, options: dict[str, Any]) -> None:
    model, images = make(name, **options).eval(), torch.randn(2, 3, 32, 32)
    loaded = patchloom.load(model.state_dict(), heads=model.config.heads)
    with torch.no_grad():
        assert_close(loaded(images), model(images), 1e-6)


@pytest.mark.parametrize("layout", ["official", "timm"])
@pytest.mark.parametrize("options", [{"norm_position": "post"}, {"stem": "linear_norm"}, {"stem": "linear_gelu"}])
def test_other_layouts_refuse_what_they_cannot_say(layout: str, options: dict[str, Any]) -> None:
    model = make("deit_nano", **options)
    with pytest.raises(PatchloomError, match="no counterpart"):
        from_ours(model.state_dict(), model.config, layout)


def test_configs_without_the_new_fields_load_as_before() -> None:
    model = make("deit_nano")
    old = {
        key: value
        for key, value in model.config.to_json().items()
        if key not in ("dropout", "norm_position", "scale_scalar")
    }
    assert config_from_json(old) == model.config


def test_dropout_acts_after_the_embedding_the_projection_and_twice_in_the_ffn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("deit_nano", dropout=0.25).train()
    seen: list[tuple[tuple[int, ...], float]] = []

    def note(x: Tensor, rate: float, *_: Any) -> Tensor:
        seen.append((tuple(x.shape), rate))
        return x

    monkeypatch.setattr(F, "dropout", note)
    monkeypatch.setattr(type(model.blocks[0].ffn.branches[0]), "fast", False)
    model(torch.randn(2, 3, 32, 32))
    whole = [(2, 65, width) for width in (96, 96, 384, 96)]  # embedding, projection, after GELU, after fc2
    last = [(2, 1, width) for width in (96, 384, 96)]  # the class token alone
    assert seen == [(shape, 0.25) for shape in whole + last]


def test_dropout_keeps_the_mean_in_training_and_changes_nothing_in_eval() -> None:
    ffn = make("deit_nano", dropout=0.5).blocks[0].ffn.branches[0].fn
    x = torch.randn(1, 1, 96)
    with torch.no_grad():
        plain = ffn.eval()(x)[0, 0]
        assert_close(plain, ffn.fc2(F.gelu(ffn.fc1(x)))[0, 0], 1e-6)
        dropped = ffn.train()(x.expand(1, 20000, 96))[0]
    assert ((dropped.mean(dim=0) - plain).abs() < 5 * dropped.std(dim=0) / 20000**0.5).all()
    assert abs(float((dropped == 0).float().mean()) - 0.5) < 0.01


@pytest.mark.parametrize("dropout", [-0.1, 1.0, True])
def test_an_impossible_dropout_is_refused(dropout: Any) -> None:
    with pytest.raises(PatchloomError, match="dropout"):
        make("deit_nano", dropout=dropout)


def test_post_norm_is_torch_s_post_norm_transformer() -> None:
    """torch.nn.TransformerEncoderLayer(norm_first=False) as an independent reference."""
    model = make("deit_nano", norm_position="post", depth=1).eval()
    block, x = model.blocks[0], torch.randn(2, 7, 96)
    attention, ffn = block.mixing.branches[0].fn, block.ffn.branches[0].fn
    layer = nn.TransformerEncoderLayer(
        96, 3, 384, 0.0, F.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=False
    ).eval()
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": attention.qkv.weight,
            "self_attn.in_proj_bias": attention.qkv.bias,
            "self_attn.out_proj.weight": attention.proj.weight,
            "self_attn.out_proj.bias": attention.proj.bias,
            "linear1.weight": ffn.fc1.weight,
            "linear1.bias": ffn.fc1.bias,
            "linear2.weight": ffn.fc2.weight,
            "linear2.bias": ffn.fc2.bias,
            "norm1.weight": block.mixing.norm.weight,
            "norm1.bias": block.mixing.norm.bias,
            "norm2.weight": block.ffn.norm.weight,
            "norm2.bias": block.ffn.norm.bias,
        }
    )
    assert_close(block(x), layer(x), 1e-5)
    assert_close(block(x, 2), layer(x)[:, :2], 1e-5)


def test_parallel_post_norm_branches_share_one_norm_and_there_is_no_final_one() -> None:
    model = make("deit_nano", branches=3, norm_position="post")
    residual, x = model.blocks[0].ffn, torch.randn(2, 4, 96)
    assert_close(residual(x), residual.norm(x + sum(branch.fn(x) for branch in residual.branches)), 1e-5)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert norms == [f"blocks.{i}.{part}.norm" for i in range(2) for part in ("mixing", "ffn")]
    features = model.eval().features(torch.randn(1, 3, 32, 32)).tokens
    assert features.isfinite().all()


def test_post_norm_without_norms_is_refused() -> None:
    with pytest.raises(PatchloomError, match="published"):
        make("deit_nano", norm_position="post", scale="rezero", scale_form="published")


@pytest.mark.parametrize(("depth", "rule", "start"), [(2, "depth", 0.1), (20, "depth", 1e-5), (2, "fixed", 1e-4)])
def test_epsilon_starts_where_layerscale_does(depth: int, rule: str, start: float) -> None:
    options = {"num_classes": 2, "img_size": 32, "dim": 48, "depth": depth, "scale_rule": rule}
    scalar = patchloom.create_model("deit_nano", scale="epsilon", **options)
    vector = patchloom.create_model("deit_nano", scale="layerscale", **options)
    alphas = [p for name, p in scalar.named_parameters() if name.endswith(".alpha")]
    gammas = [p for name, p in vector.named_parameters() if name.endswith(".gamma")]
    assert len(alphas) == len(gammas) == 2 * depth
    assert all(a.item() == g[0].item() == pytest.approx(start) for a, g in zip(alphas, gammas, strict=True))
    given = patchloom.create_model("deit_nano", scale="epsilon", scale_value=0.25, **options)
    assert given.blocks[0].ffn.branches[0].scale.alpha.item() == 0.25


def test_t_fixup_s_scalar_starts_at_one_and_changes_nothing_there() -> None:
    torch.manual_seed(0)
    plain = patchloom.create_model("deit_nano", num_classes=2, depth=2, scale="t-fixup")
    torch.manual_seed(0)
    model = patchloom.create_model("deit_nano", num_classes=2, depth=2, scale="t-fixup", scale_scalar=True)
    scales = [module for module in model.modules() if isinstance(module, ScalarScale)]
    assert [scale.alpha.item() for scale in scales] == [1.0] * 4
    images = torch.randn(2, 3, 32, 32)
    assert_close(model.eval()(images), plain.eval()(images), 1e-6)
    fixed = patchloom.create_model("deit_nano", depth=1, scale="t-fixup", scale_scalar=True, scale_trainable=False)
    assert not fixed.blocks[0].ffn.branches[0].scale.alpha.requires_grad


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"scale": "rezero", "scale_scalar": True}, "scale_scalar"),
        ({"scale": "t-fixup", "scale_value": 0.5}, "scale_value"),
        ({"scale": "epsilon", "scale_form": "published"}, "scale_form"),
        ({"scale": "epsilon", "scale_init": "zero"}, "scale_init"),
    ],
)
def test_scale_options_without_their_scale_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(PatchloomError, match=word):
        make("deit_nano", **options)


@pytest.mark.parametrize("scale", ["none", "t-fixup", "constant", "exclusive_gate", "linear_shortcut"])
def test_no_scale_value_is_accepted_by_every_scale(scale: str) -> None:
    make("deit_nano", scale=scale, scale_value=None, drop_path=0.1, drop_path_decay="uniform")


@pytest.mark.parametrize("scale", ["exclusive_gate", "shortcut_gate", "linear_shortcut"])
def test_gate_matrices_have_weight_decay_and_their_biases_have_none(scale: str) -> None:
    model = make("deit_nano", scale=scale)
    decay = {
        id(parameter): group["weight_decay"]
        for group in parameter_groups(model, find_recipe("deit").replace(weight_decay=0.05))
        for parameter in group["params"]
    }
    roles = patchloom.parameter_roles(model)
    gates = {name: p for name, p in model.named_parameters() if ".gate." in name}
    assert len(gates) == 8
    assert {roles[name] for name in gates} == {"gate"}
    assert {name.endswith("weight"): decay[id(p)] for name, p in gates.items()} == {True: 0.05, False: 0.0}


def test_the_stems_of_table_7_follow_their_formulas() -> None:
    linear = make("deit_nano")
    conv, x = linear.stem.proj, torch.randn(3, 3, 32, 32)
    y = conv(x).flatten(2).transpose(1, 2)
    for options, want in (
        ({"stem": "linear_gelu"}, F.gelu(y)),
        ({"stem": "linear_norm", "stem_norm": "layer"}, F.layer_norm(y, (96,), eps=1e-6)),
        ({"stem": "linear_norm"}, F.batch_norm(y.transpose(1, 2), None, None, training=True).transpose(1, 2)),
    ):
        stem = patchloom.create_model("deit_nano", **options).stem.train()
        stem.proj[0].load_state_dict(conv.state_dict())
        assert_close(stem(x), want, 1e-5)
        assert_close(stem.plain(x), want, 1e-5)


def test_the_paper_s_further_shapes_are_listed() -> None:
    assert {"vit_tiny_24x1", "vit_tiny_12x2", "vit_base_13x1"} <= set(patchloom.list_models("vit_*"))
