"""Weights in other layouts: timm's own networks take them strictly, and `load` gives the same network back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from conftest import assert_close, stir
from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.exporting import export
from patchloom.models.network import Network

NANO = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3, "num_classes": 5}
VIT = "vit_tiny_patch16_224"
IN_TIMM = [  # a network of ours, and how a user of timm makes one for its weights
    ("deit_nano", {}, VIT, {}),
    ("deit_nano", {"distilled": True}, "deit_tiny_distilled_patch16_224", {}),
    ("deit_nano", {"in_chans": 1, "img_size": (16, 32)}, VIT, {"in_chans": 1, "img_size": (16, 32)}),
    ("deit3_nano", {}, "deit3_small_patch16_224", {}),
    ("deit3_nano", {"scale": "none"}, VIT, {"no_embed_class": True}),
    ("deit3_nano", {"heads": 2, "mlp_ratio": 2.0}, "deit3_small_patch16_224", {"num_heads": 2, "mlp_ratio": 2.0}),
    (
        "vit_tiny_6x2",
        {"scale": "layerscale"},
        "vit_small_patch16_18x2_224",
        {"img_size": 224, "patch_size": 16, "embed_dim": 192},
    ),
    ("cait_nano", {"class_depth": 3}, "cait_xxs24_224", {"num_heads": 4, "depth_token_only": 3}),
]
NOT_IN_TIMM = [
    ("patchconvnet_nano", {}),
    ("deit_nano", {"stem": "hmlp"}),
    ("deit_nano", {"scale": "rezero"}),
    ("deit_nano", {"head": "mlp"}),
    ("deit3_nano", {"distilled": True}),
    ("cait_nano", {"distilled": True}),
    ("resmlp_nano", {"aggregation": "class_mlp"}),
]
OFFICIAL = [
    *(("deit_nano", {}), ("deit_nano", {"distilled": True}), ("deit3_nano", {}), ("deit3_nano", {"branches": 2})),
    *(
        ("cait_nano", {}),
        ("resmlp_nano", {}),
        ("patchconvnet_nano", {}),
        ("patchconvnet_nano", {"queries": "per_class"}),
    ),
]


def network(name: str, **options) -> Network:
    model = stir(patchloom.create_model(name, num_classes=5, **{"depth": 2, **options})).eval()
    model.class_names = tuple("abcde")
    return model


def check_same(model: Network, back: Network) -> None:
    x = torch.randn(2, model.config.in_chans, *model.config.img_size)
    with torch.no_grad():
        assert_close(back(x), model(x), 1e-6)
    assert back.class_names == model.class_names
    assert back.preprocessing == model.preprocessing
    assert back.config.name == model.config.name


@pytest.mark.parametrize(("name", "options", "theirs", "arguments"), IN_TIMM)
def test_timm_takes_it_strictly(name: str, options: dict, theirs: str, arguments: dict, tmp_path: Path) -> None:
    model = network(name, **options)
    path = tmp_path / "w.safetensors"
    assert export(model, "timm", path).difference < 1e-5
    module = import_timm().create_model(theirs, **{**NANO, **arguments}).eval()
    module.load_state_dict(load_file(path))
    x = torch.randn(2, model.config.in_chans, *model.config.img_size)
    with torch.no_grad():
        assert_close(module(x), model(x), 1e-5)
    check_same(model, patchloom.load(path))


def test_timm_takes_every_resmlp(tmp_path: Path) -> None:
    mixer = import_timm().models.mlp_mixer
    model = network("resmlp_nano", depth=3, mlp_ratio=2.0)
    export(model, "timm", tmp_path / "w.safetensors")
    sizes = {"num_classes": 5, "img_size": 32, "patch_size": 4, "num_blocks": 3, "embed_dim": 96, "mlp_ratio": 2.0}
    theirs = mixer.MlpMixer(**sizes, block_layer=mixer.ResBlock, norm_layer=mixer.Affine).eval()
    theirs.load_state_dict(load_file(tmp_path / "w.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(theirs(x), model(x), 1e-5)
    check_same(model, patchloom.load(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(("name", "options"), NOT_IN_TIMM)
def test_what_timm_does_not_have_is_refused(name: str, options: dict, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"timm"):
        export(network(name, **options), "timm", tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(("name", "options"), OFFICIAL)
def test_the_official_layout_comes_back(name: str, options: dict, suffix: str, tmp_path: Path) -> None:
    model = network(name, **options)
    path = tmp_path / f"w{suffix}"
    export(model, "official", path)
    check_same(model, patchloom.load(path))
    if suffix == ".pth":  # as the authors' scripts read it
        tensors = torch.load(path, weights_only=True)["model"]
        assert "cls_token" in tensors or name.startswith("resmlp")


def test_our_own_form_takes_every_network(tmp_path: Path) -> None:
    model = network("deit_nano", scale="rezero", stem="hmlp")
    export(model, "safetensors", tmp_path / "w.safetensors")
    check_same(model, patchloom.load(tmp_path / "w.safetensors"))
