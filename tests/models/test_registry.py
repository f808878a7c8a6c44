"""Names, options, and the errors that suggest the right ones."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import patchloom
from patchloom import PatchloomError
from patchloom.models.registry import config_from_json, entries, find_config


def test_patterns_select_names() -> None:
    assert patchloom.list_models("cait_xxs*") == ["cait_xxs24", "cait_xxs36"]
    assert len(patchloom.list_models()) == len(set(patchloom.list_models())) > 60
    assert patchloom.list_models("nothing*") == []


def test_any_depth_and_number_of_branches() -> None:
    config = find_config("vit_tiny_7x5")
    assert (config.dim, config.depth, config.branches) == (192, 7, 5)
    with pytest.raises(PatchloomError):
        find_config("vit_tiny_0x2")


def test_any_timm_convnet_can_be_pooled_by_attention() -> None:
    model = patchloom.create_model("resnet18_attention_pool", num_classes=4, img_size=64, queries="per_class")
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4)
    assert model.config.dim == 512
    assert patchloom.complexity(model).params == sum(p.numel() for p in model.parameters())
    with pytest.raises(PatchloomError, match="resnet18"):
        patchloom.create_model("resnet81_attention_pool")
    with pytest.raises(PatchloomError, match="map"):
        patchloom.create_model("mixer_s16_224_attention_pool", img_size=224)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cait_xss24", {}, "cait_xxs24"),
        ("zzzzzz", {}, "patchloom models"),
        ("deit_tiny", {"dpeth": 3}, "'depth'"),
        ("deit_tiny", {"img_size": 225}, "225 x 225"),
        ("deit_tiny", {"img_size": (224, 230)}, "224 x 230"),
        ("deit_tiny", {"img_size": "big"}, "'big'"),
        ("deit_tiny", {"img_size": 0}, "0"),
        ("deit_tiny", {"heads": 5}, "divisible"),
        ("deit_tiny", {"heads": 0}, "heads"),
        ("deit_tiny", {"stem": "conf"}, "'linear', 'linear_norm', 'linear_gelu', 'hmlp', 'conv'"),
        ("deit_tiny", {"depth": "12"}, "whole number"),
        ("deit_tiny", {"depth": -1}, "depth"),
        ("deit_tiny", {"depth": True}, "depth"),
        ("deit_tiny", {"drop_path": 1.0}, "drop_path"),
        ("deit_tiny", {"drop_path": float("nan")}, "drop_path"),
        ("deit_tiny", {"num_classes": 0}, "from 1 to 10000000, not 0"),
        ("deit_tiny", {"stem": "hmlp", "patch_size": 32}, "16, 8, 4 and 2"),
        ("deit_tiny", {"stem": "hmlp", "patch_size": 14}, "16, 8, 4 and 2"),
        ("deit_tiny", {"stem": "conv", "patch_size": 12, "img_size": 24}, "16, 8, 4 and 2"),
        ("deit_tiny", {"class_token_at": 12}, "12"),
        ("deit_tiny_distilled", {"aggregation": "average"}, "distillation"),
        ("patchconvnet_nano", {"queries": "per_class", "aggregation": "average"}, "attention"),
        ("patchconvnet_s20", {"norm": "affine"}, "'layer', 'batch'"),
        ("resmlp_s12", {"heads": 3}, "no option 'heads'"),
        ("deit_tiny", {"mlp_ratio": -1.0}, "mlp_ratio"),
        ("deit_tiny", {"scale_init": "zero"}, "layerscale"),
        ("deit_tiny", {"scale": "layerscale", "scale_form": "published"}, "rezero"),
        ("deit_tiny", {"scale_value": 0.1}, "scale_value"),
        ("deit_tiny", {"scale_trainable": False}, "scale_trainable"),
        ("deit_tiny", {"class_in_keys": False}, "class_attention"),
        ("resnet50_attention_pool", {"dim": 64}, "2048"),
        ("vgg11_attention_pool", {}, "no feature map"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_right_ones(name: str, options: dict, words: str) -> None:
    with pytest.raises(PatchloomError) as caught:
        patchloom.create_model(name, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.config.name)
def test_configs_survive_json(entry) -> None:
    assert config_from_json(json.loads(json.dumps(entry.config.to_json()))) == entry.config


@settings(deadline=None)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 5), name=st.sampled_from(["deit_nano", "cait_nano", "resmlp_nano"])
)
def test_any_size_that_the_patch_divides(rows: int, columns: int, name: str) -> None:
    model = patchloom.create_model(name, num_classes=2, img_size=(4 * rows, 4 * columns), depth=1)
    assert model(torch.randn(1, 3, 4 * rows, 4 * columns)).shape == (1, 2)


def test_sizes_are_height_then_width() -> None:
    assert patchloom.create_model("deit_tiny", img_size=(192, 256), depth=1).config.grid == (12, 16)


def test_an_unknown_kind_of_models_is_refused() -> None:
    with pytest.raises(PatchloomError, match="Unknown kind 'audio' of models"):
        patchloom.list_models(kind="audio")
