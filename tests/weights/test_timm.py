"""timm is an independent oracle: converted weights give its logits, and what we write loads back into it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from conftest import assert_close, stir
from patchloom.compat import import_timm

timm = import_timm()

CASES = [
    ("deit_tiny_patch16_224", 224, {}),
    ("deit_tiny_patch16_224", 384, {"depth": 2}),
    ("deit_tiny_distilled_patch16_224", 224, {"depth": 3}),
    ("deit_tiny_distilled_patch16_224", 384, {"depth": 2}),
    ("deit3_small_patch16_224", 224, {"depth": 3}),
    ("deit3_small_patch16_384", 384, {"depth": 2}),
    ("deit3_huge_patch14_224", 224, {"depth": 1, "embed_dim": 64, "num_heads": 1}),
    ("cait_xxs24_224", 224, {"depth": 4}),
    ("cait_xxs24_384", 384, {"depth": 2}),
    ("resmlp_12_224", 224, {}),
    ("resmlp_12_224", 384, {}),
    ("vit_small_patch16_18x2_224", 224, {"depth": 2}),
    ("vit_small_patch16_36x1_224", 224, {"depth": 2}),
]


@pytest.mark.parametrize(("name", "size", "options"), CASES)
def test_logits_equal_timms_and_our_file_loads_back(name: str, size: int, options: dict, tmp_path) -> None:
    theirs = stir(timm.create_model(name, img_size=size, **options)).eval()
    ours = patchloom.load(theirs.state_dict())
    assert ours.config.img_size == (size, size)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        want = theirs(x)
        assert_close(ours(x), want, 1e-5, name)
        patchloom.save(ours, tmp_path / "back.safetensors", layout="timm")
        for parameter in theirs.parameters():
            parameter.zero_()
        theirs.load_state_dict(load_file(tmp_path / "back.safetensors"))
        assert_close(theirs(x), want, 1e-5, f"{name} written in timm's layout")


def test_a_parallel_vit_of_ours_loads_into_timm(tmp_path) -> None:
    """timm gives the class token a position, ours has none: a zero one is written."""
    ours = stir(patchloom.create_model("vit_small_2x2", scale="layerscale", num_classes=9)).eval()
    theirs = timm.create_model("vit_small_patch16_18x2_224", depth=2, num_classes=9).eval()
    patchloom.save(ours, tmp_path / "ours.safetensors", layout="timm")
    theirs.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert_close(theirs(x), ours(x), 1e-5)


def test_names_are_found_again() -> None:
    pairs = {
        "deit_tiny_patch16_224": "deit_tiny",
        "deit_tiny_distilled_patch16_224": "deit_tiny_distilled",
        "deit3_small_patch16_384": "deit3_small",
        "cait_xxs24_224": "cait_xxs24",
        "resmlp_12_224": "resmlp_s12",
    }
    for theirs, ours in pairs.items():
        config = patchloom.load(timm.create_model(theirs).state_dict()).config
        assert config.name == ours
        assert config.drop_path_decay == "linear" if ours.startswith("deit_") else True
