"""Loading: layouts, inference of the architecture, resizing, reports, refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import patchloom
from conftest import REFERENCE, assert_close, stir
from patchloom import PatchloomError
from patchloom.layers.mixing import CrossPatchLinear
from patchloom.models.registry import build, find_config
from patchloom.weights.layouts import from_ours, to_ours
from patchloom.weights.resize import resize_class_mlp

VARIANTS = [
    ("deit_nano", {}),
    ("deit_nano", {"distilled": True}),
    ("deit_nano", {"scale": "rezero", "aggregation": "average"}),
    ("deit_nano", {"scale": "fixup", "class_token_at": 2}),
    ("deit_nano", {"aggregation": "class_attention", "class_depth": 1, "class_in_keys": False, "heads": 2}),
    ("deit_nano", {"scale": "exclusive_gate", "stem": "conv", "stem_norm": "layer"}),
    ("deit3_nano", {"in_chans": 1}),
    ("vit_tiny_2x3", {"img_size": (32, 48), "patch_size": 8, "scale": "layerscale"}),
    ("vit_tiny_2x1", {"img_size": 32, "stem": "hmlp", "stem_norm": "layer"}),
    ("cait_nano", {"distilled": True, "class_scale": False}),
    ("cait_nano", {"talking_heads": False}),
    ("resmlp_nano", {"mixing": "separable", "aggregation": "class_mlp", "norm": "layer"}),
    ("patchconvnet_nano", {"queries": "per_class", "heads": 2, "norm": "batch"}),
    ("patchconvnet_nano", {"stem": "linear", "aggregation": "average"}),
]


def make(name: str, options: dict, classes: int = 6):
    return stir(patchloom.create_model(name, num_classes=classes, **options), 0.5).eval()


def same_function(a, b) -> None:
    x = torch.randn(2, a.config.in_chans, *a.config.img_size)
    with torch.no_grad():
        assert_close(b(x), a(x), 1e-5)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_our_own_files_need_no_hint(name: str, options: dict, tmp_path: Path) -> None:
    model = make(name, options)
    patchloom.save(model, tmp_path / "own.safetensors")
    back = patchloom.load(tmp_path / "own.safetensors")
    assert back.config == model.config
    assert not back.training
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), back.state_dict().values(), strict=True))
    same_function(model, back)
    assert len(back.load_report.loaded) == len(model.state_dict())


OFFICIAL = [
    ("deit_tiny", {}, {}),
    ("deit_tiny_distilled", {}, {}),
    ("deit3_tiny", {"in_chans": 4}, {}),
    ("vit_tiny_2x1", {"stem": "hmlp", "patch_size": 8}, {}),
    ("vit_tiny_2x1", {"stem": "conv", "stem_norm": "layer"}, {}),
    ("vit_tiny_3x4", {"scale": "layerscale"}, {}),
    ("cait_xxs24", {"depth": 3}, {}),
    ("cait_xxs24", {"depth": 3, "talking_heads": False, "class_scale": False, "class_depth": 3, "distilled": True}, {}),
    ("resmlp_s12", {"depth": 2}, {}),
    ("resmlp_s12", {"depth": 2, "aggregation": "class_mlp", "mixing": "mlp", "norm": "layer"}, {}),
    ("patchconvnet_s20", {"depth": 2}, {"img_size": 64}),
    ("patchconvnet_s20", {"depth": 2, "queries": "per_class", "stem": "linear", "norm": "batch"}, {"img_size": 64}),
]


@pytest.mark.parametrize(("name", "options", "hints"), OFFICIAL)
def test_the_official_layout_tells_its_architecture(name: str, options: dict, hints: dict) -> None:
    """Tensors alone: no metadata, no name."""
    config = find_config(name).replace(**{"img_size": (64, 64), "num_classes": 5, "depth": 2, **options})
    model = stir(build(config), 0.5).eval()
    back = patchloom.load(from_ours(model.state_dict(), config, "official"), **hints)
    same_function(model, back)


@pytest.mark.parametrize("layout", ["official", "timm"])
@pytest.mark.parametrize("name", ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano"])
def test_other_layouts_keep_every_value(name: str, layout: str, tmp_path: Path) -> None:
    model = make(name, {})
    patchloom.save(model, tmp_path / "other.safetensors", layout=layout)
    assert set(load_file(tmp_path / "other.safetensors")) != set(model.state_dict())
    back = patchloom.load(tmp_path / "other.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["deit_nano", "deit3_nano", "cait_nano", "vit_tiny_2x3", "resmlp_nano", "patchconvnet_nano"]),
    depth=st.integers(1, 3),
    classes=st.integers(1, 4),
)
def test_names_survive_a_round_trip_through_every_layout(name: str, depth: int, classes: int) -> None:
    config = find_config(name).replace(depth=depth, num_classes=classes, img_size=(32, 32), patch_size=4, dim=12)
    state = build(config).state_dict()
    for layout in ("official", "timm"):
        if layout == "timm" and name.startswith("patchconvnet"):
            continue
        _, back, unknown = to_ours(from_ours(dict(state), config, layout))
        assert set(back) == set(state)
        assert not unknown


def test_a_parallel_vit_comes_back_from_timms_layout(tmp_path: Path) -> None:
    """There it has a position for the class token, a zero one: another config, the same function."""
    model = make("vit_tiny_2x2", {"img_size": 32, "scale": "layerscale"})
    patchloom.save(model, tmp_path / "timm.safetensors", layout="timm")
    same_function(model, patchloom.load(tmp_path / "timm.safetensors"))
    options = {"aggregation": "class_attention", "talking_heads": True, "scale": "layerscale", "heads": 4}
    model = make("vit_tiny_2x1", {"img_size": 32, **options})
    patchloom.save(model, tmp_path / "timm.safetensors", layout="timm")
    same_function(model, patchloom.load(tmp_path / "timm.safetensors"))
    same_function(model, patchloom.load(load_file(tmp_path / "timm.safetensors")))


@pytest.mark.parametrize("trunk", ["resnet18", "resnetblur18"])
def test_a_pooled_convnet_comes_back(trunk: str, tmp_path: Path) -> None:
    """resnetblur18 has buffers that no file holds."""
    model = make(f"{trunk}_attention_pool", {"img_size": 64})
    patchloom.save(model, tmp_path / "pooled.safetensors")
    same_function(model, patchloom.load(tmp_path / "pooled.safetensors"))


def test_layouts_that_cannot_hold_a_network_refuse_it(tmp_path: Path) -> None:
    for name, options, layout, words in [
        ("patchconvnet_nano", {}, "timm", "no counterpart in the timm layout"),
        *[("deit_nano", {"scale": scale}, "official", "no counterpart") for scale in ("rezero", "constant")],
        ("deit_nano", {"scale": "dropout_shortcut"}, "official", "no counterpart"),
        ("deit_nano", {"class_token_at": 2}, "official", "no counterpart"),
        ("deit_nano", {"aggregation": "average"}, "official", "no counterpart"),
        ("cait_nano", {"class_in_keys": False}, "official", "no counterpart"),
        ("deit_nano", {"scale": "rezero"}, "timm", "no counterpart"),
        ("deit_nano", {"stem": "conv"}, "timm", "no counterpart"),
        ("cait_nano", {"class_in_keys": False}, "timm", "no counterpart"),
        ("resmlp_nano", {"mixing": "conv"}, "timm", "no counterpart"),
        ("deit_nano", {}, "tim", "Choose from: patchloom, official, timm"),
    ]:
        with pytest.raises(PatchloomError, match=words):
            patchloom.save(make(name, options), tmp_path / "x.safetensors", layout=layout)
    assert not list(tmp_path.iterdir())


def test_published_and_trained_pth_files_load(tmp_path: Path) -> None:
    """The wrappers of the official files: "model", "module.", and the training script's arguments beside them."""
    model = make("deit_nano", {})
    official = from_ours(model.state_dict(), model.config, "official")
    wrapped = {f"module.{key}": value for key, value in official.items()}
    trained = {"model": wrapped, "args": argparse.Namespace(lr=1), "epoch": 3}
    for content in (official, {"model": official}, {"state_dict": wrapped}, trained):
        torch.save(content, tmp_path / "some.pth")
        same_function(model, patchloom.load(tmp_path / "some.pth", heads=3))


def test_half_precision_files_load_as_float32() -> None:
    model = make("deit_nano", {})
    back = patchloom.load({key: value.half() for key, value in model.state_dict().items()}, heads=3)
    assert next(back.parameters()).dtype == torch.float32


# Sizes


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("deit_tiny", "with_1_prefix"), ("deit_tiny_distilled", "with_2_prefix"), ("deit3_tiny", "patch")],
)
@pytest.mark.parametrize(("size", "grid"), [((384, 384), "24x24"), ((160, 272), "10x17")])
def test_positions_are_resized_as_the_authors_do(name: str, prefix: str, size: tuple[int, int], grid: str) -> None:
    recorded = load_file(REFERENCE / "pos_embed_interp.safetensors")
    model = patchloom.create_model(name, dim=16, depth=1, heads=1, num_classes=4)
    state = {**model.state_dict(), "positions": recorded[f"{prefix}_14x14"].float()}
    back = patchloom.load(state, heads=1, img_size=size)
    assert_close(back.positions, recorded[f"{prefix}_{grid}"], 1e-5)
    assert back.config.img_size == size
    assert "positions" in back.load_report.resized


def test_a_rectangle_can_be_the_source_and_the_target() -> None:
    model = make("cait_nano", {"img_size": (32, 48)})
    state = model.state_dict()
    with pytest.raises(PatchloomError, match="source_size"):
        patchloom.load(state)
    same_function(model, patchloom.load(state, img_size=(32, 48)))
    same_function(model, patchloom.load(state, source_size=(32, 48)))
    other = patchloom.load(state, source_size=(32, 48), img_size=(48, 32))
    assert other.config.grid == (12, 8)
    assert not torch.equal(other.positions, model.positions)
    transposed = patchloom.load(state, img_size=(48, 32))  # as many tokens: taken as recorded at it
    assert torch.equal(transposed.positions, model.positions)


@pytest.mark.parametrize(("name", "size"), [("deit3_tiny", (208, 240)), ("deit_tiny_distilled", (176, 288))])
def test_the_square_wins_over_a_size_that_fits_with_other_prefix_tokens(name: str, size: tuple[int, int]) -> None:
    """196 positions are 14 x 14 patches, not a class token and 13 x 15."""
    model = patchloom.create_model(name, dim=16, depth=1, heads=1, num_classes=4)
    back = patchloom.load(model.state_dict(), heads=1, img_size=size)
    assert "grid 14 x 14 ->" in back.load_report.resized["positions"]
    assert back.config.position_prefix == model.config.position_prefix


def test_one_query_of_one_class_is_told_by_its_head() -> None:
    model = make("patchconvnet_nano", {"queries": "per_class"}, classes=1)
    same_function(model, patchloom.load(from_ours(model.state_dict(), model.config, "official"), img_size=32))


def test_hints_are_kept_whether_the_model_is_listed_or_not() -> None:
    for name, heads in (("deit_nano", 3), ("deit_tiny", 3)):
        model = patchloom.create_model(name, num_classes=2)
        hints = {"drop_path": 0.2, "drop_path_decay": "uniform", "name": "mine"}
        back = patchloom.load(model.state_dict(), heads=heads, **hints)
        assert {hint: getattr(back.config, hint) for hint in hints} == hints


def test_what_was_assumed_is_noted() -> None:
    model = patchloom.create_model("deit_tiny", num_classes=2, depth=1)
    assert "heads=3 is assumed" in str(patchloom.load(model.state_dict()).load_report)
    assert "heads=3 is assumed" not in str(patchloom.load(model.state_dict(), heads=3).load_report)


def test_our_own_files_are_not_contradicted(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    patchloom.save(model, tmp_path / "own.safetensors")
    same_function(model, patchloom.load(tmp_path / "own.safetensors", heads=3, source_size=32, drop_path=0.1))
    for hints, words in [
        ({"heads": 6}, "heads=3, which contradicts 6"),
        ({"source_size": (16, 64)}, r"source_size=\(32, 32\), which contradicts \(16, 64\)"),
        ({"headz": 6}, "'heads'"),
    ]:
        with pytest.raises(PatchloomError, match=words):
            patchloom.load(tmp_path / "own.safetensors", **hints)


def test_half_precision_is_resized_in_full() -> None:
    model = make("resmlp_nano", {})
    half = {key: value.half() for key, value in model.state_dict().items()}
    full = {key: value.float() for key, value in half.items()}
    a, b = (patchloom.load(state, img_size=48, in_chans=1) for state in (half, full))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_class_mlp_row_keeps_its_sum_over_patches() -> None:
    row = torch.full((1, 1 + 16), 0.25)
    resized = resize_class_mlp(row, (4, 4), (8, 6))
    assert resized.shape == (1, 1 + 48)
    assert resized[0, 0] == 0.25
    assert_close(resized[:, 1:].sum(), row[:, 1:].sum(), 1e-6)


def test_a_checkpoint_without_a_head_gets_a_fresh_one_when_classes_are_asked_for() -> None:
    state = {key: value for key, value in make("deit_nano", {}).state_dict().items() if not key.startswith("head")}
    back = patchloom.load(state, heads=3, num_classes=7)
    assert set(back.load_report.reinitialised) == {"head.weight", "head.bias"}
    assert "no head in the file" in str(back.load_report)
    trunk = patchloom.load(state, heads=3)
    assert trunk.config.headless
    assert "num_classes=... makes one" in str(trunk.load_report)


def test_a_constant_image_is_mixed_alike_at_another_size() -> None:
    """ResMLP's matrices are interpolated and divided by the growth, so that sums over patches are kept."""
    model = make("resmlp_nano", {})
    for module in model.modules():  # smooth matrices: what interpolation is good for
        if isinstance(module, CrossPatchLinear):
            rows = torch.linspace(0, 1, 8)
            smooth = (rows[:, None] + rows[None]).flatten()
            module.weight.data = 0.01 * (1 + smooth[:, None] + smooth[None])
            module.bias.data = smooth
    bigger = patchloom.load(model.state_dict(), img_size=64)
    assert bigger.config.grid == (16, 16)
    assert len(bigger.load_report.resized) == 16
    colour = torch.randn(1, 3, 1, 1)
    with torch.no_grad():
        assert_close(bigger(colour.expand(1, 3, 64, 64)), model(colour.expand(1, 3, 32, 32)), 0.02)


def test_resizing_to_the_same_grid_changes_nothing() -> None:
    for name in ("deit_nano", "resmlp_nano"):
        model = make(name, {})
        back = patchloom.load(model.state_dict(), img_size=32, **({"heads": 3} if name == "deit_nano" else {}))
        assert not back.load_report.resized
        same_function(model, back)


def test_class_mlp_is_resized_and_mlp_mixing_is_refused(tmp_path: Path) -> None:
    model = make("resmlp_nano", {"aggregation": "class_mlp"})
    back = patchloom.load(model.state_dict(), img_size=(32, 64))
    assert back(torch.randn(1, 3, 32, 64)).shape == (1, 6)
    with pytest.raises(PatchloomError, match=r"fc1.weight has shape 256 x 64 where .* needs 512 x 128"):
        patchloom.load(make("resmlp_nano", {"mixing": "mlp"}).state_dict(), img_size=(32, 64))


def test_other_channels_adapt_the_stem() -> None:
    for name in ("deit_nano", "patchconvnet_nano"):
        model = make(name, {})
        grey = patchloom.load(
            model.state_dict(), in_chans=1, **({"heads": 3} if name == "deit_nano" else {"img_size": 32})
        )
        x = torch.randn(2, 1, 32, 32)
        with torch.no_grad():
            assert_close(grey(x), model(x.expand(-1, 3, -1, -1)), 1e-5)
        assert any(key.startswith("stem.") for key in grey.load_report.resized)
        six = patchloom.load(
            model.state_dict(), in_chans=6, **({"heads": 3} if name == "deit_nano" else {"img_size": 32})
        )
        x = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            assert_close(six(torch.cat([x, x], dim=1)), model(x), 1e-5)


def test_other_classes_start_the_heads_afresh_and_say_so() -> None:
    model = make("deit_nano", {"distilled": True})
    back = patchloom.load(model.state_dict(), heads=3, num_classes=9)
    assert set(back.load_report.reinitialised) == {
        "head.weight",
        "head.bias",
        "head_distill.weight",
        "head_distill.bias",
    }
    assert "6 classes in the file, 9 requested" in str(back.load_report)
    assert torch.equal(back.positions, model.positions)
    pooled = make("patchconvnet_nano", {"queries": "per_class"})
    back = patchloom.load(pooled.state_dict(), num_classes=9, img_size=32)
    assert set(back.load_report.reinitialised) == {"head.weight", "head.bias", "class_token"}


# Refusals


def test_foreign_missing_and_surplus_tensors_are_named() -> None:
    model = make("deit_nano", {})
    official = from_ours(model.state_dict(), model.config, "official")
    with pytest.raises(PatchloomError, match=r"alien\.weight"):
        patchloom.load({"alien.weight": torch.zeros(3)})
    with pytest.raises(PatchloomError, match=r"Unknown: alien\.weight"):
        patchloom.load({**official, "alien.weight": torch.zeros(3)}, heads=3)
    lacking = {key: value for key, value in official.items() if key != "blocks.3.mlp.fc1.weight"}
    with pytest.raises(PatchloomError, match=r"Missing: blocks\.3\.mlp\.fc1\.weight"):
        patchloom.load(lacking, heads=3)
    loose = patchloom.load({**lacking, "alien.weight": torch.zeros(3)}, heads=3, strict=False)
    assert loose.load_report.missing == ["blocks.3.ffn.branches.0.fn.fc1.weight"]
    assert loose.load_report.unused == ["alien.weight"]
    assert "unknown, not used" in str(loose.load_report)
    wrong = {**official, "norm.weight": torch.zeros(7)}
    with pytest.raises(PatchloomError, match=r"norm\.weight has shape 7 where deit_nano needs 96"):
        patchloom.load(wrong, heads=3)


SINGLE = [
    ("deit_nano", {}),
    ("deit_nano", {"distilled": True}),
    ("deit3_nano", {}),
    ("vit_tiny_2x2", {"stem": "hmlp", "patch_size": 8, "img_size": 32}),
    ("cait_nano", {}),
    ("resmlp_nano", {}),
    ("resmlp_nano", {"aggregation": "class_mlp", "mixing": "separable"}),
    ("patchconvnet_nano", {}),
    ("patchconvnet_nano", {"queries": "per_class"}),
]


@pytest.mark.parametrize("layout", ["patchloom", "official", "timm"])
@pytest.mark.parametrize(("name", "options"), SINGLE)
def test_any_one_tensor_that_is_missing_is_named(name: str, options: dict, layout: str) -> None:
    """Whichever it is, in whatever layout: refused by name, or, if not strict, reported; never another network."""
    if layout == "timm" and (name.startswith("patchconvnet") or "stem" in options or "mixing" in options):
        pytest.skip("timm has no such network")
    model = make(name, {"depth": 2, **options}, classes=3)
    heads = {"heads": model.config.heads} if hasattr(model.config, "heads") else {}
    hints = {"img_size": model.config.img_size, **heads}
    whole = from_ours(model.state_dict(), model.config, layout)
    for i, lost in enumerate(whole):
        if lost.endswith("num_batches_tracked"):
            continue
        state = {key: value for key, value in whole.items() if key != lost}
        with pytest.raises(PatchloomError) as caught:
            patchloom.load(state, **hints)
        assert lost in str(caught.value), f"{lost} is not in: {caught.value}"
        # the stem's kernels, and one of many heads: without these the network cannot be told
        if i % 9 or "stem.proj" in lost or "patch_embed.proj" in lost or lost.startswith("head."):
            continue
        assert len(patchloom.load(state, strict=False, **hints).load_report.missing) == 1


def test_an_average_of_patches_is_a_hint() -> None:
    model = make("deit_nano", {"aggregation": "average"})
    same_function(model, patchloom.load(model.state_dict(), heads=3, aggregation="average"))
    with pytest.raises(PatchloomError, match=r"class_token.*aggregation='average'"):
        patchloom.load(model.state_dict(), heads=3)


def test_what_tensors_cannot_tell_is_asked_for() -> None:
    model = patchloom.create_model("deit_nano", dim=80, heads=4, num_classes=3)
    with pytest.raises(PatchloomError, match="heads="):
        patchloom.load(model.state_dict())
    assert patchloom.load(model.state_dict(), heads=4).config.heads == 4
    with pytest.raises(PatchloomError, match="divisible"):
        patchloom.load(model.state_dict(), heads=3)
    with pytest.raises(PatchloomError, match="'drop_path'"):
        patchloom.load(model.state_dict(), heads=4, dorp_path=0.1)
    assert patchloom.load(model.state_dict(), heads=4, drop_path=0.1).config.drop_path == 0.1
    with pytest.raises(PatchloomError, match="'heads'"):
        patchloom.load(model.state_dict(), headz=4)
    with pytest.raises(PatchloomError, match="VisionTransformer"):
        patchloom.load(model)
    with pytest.raises(PatchloomError, match="42"):
        patchloom.load(model.state_dict(), heads=4, img_size=42)


def test_preprocessing_and_class_names_travel_along(tmp_path: Path) -> None:
    model = make("resmlp_nano", {})
    model.class_names = tuple("abcdef")
    patchloom.save(model, tmp_path / "a.safetensors", layout="timm")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["patchloom"])["preprocessing"]["crop_ratio"] == 0.9
    back = patchloom.load(tmp_path / "a.safetensors", img_size=48)
    assert back.class_names == tuple("abcdef")
    assert back.preprocessing.crop_ratio == 0.9
    assert back.preprocessing.img_size == (48, 48)
    assert patchloom.load(tmp_path / "a.safetensors", num_classes=3).class_names is None
