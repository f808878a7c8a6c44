"""Weights of DINO, MAE and BeiT in timm's and the authors' layouts: the encoder loads, the rest is named."""

from __future__ import annotations

import argparse

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import patchloom
from conftest import assert_close, stir
from patchloom import PatchloomError
from patchloom.compat import import_timm

timm = import_timm()


@pytest.mark.parametrize(
    ("name", "expected"), [("vit_small_patch16_224.dino", "deit_small"), ("vit_base_patch16_224.mae", "deit_base")]
)
def test_timms_dino_and_mae_networks_load_as_trunks(name: str, expected: str) -> None:
    theirs = stir(timm.create_model(name)).eval()
    ours = patchloom.load(theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert_close(ours.features(images).tokens, theirs.forward_features(images), 1e-5, "tokens")
        assert_close(ours.embed(images), theirs(images), 1e-5, "embedding")
    assert ours.config.headless
    assert ours.config.name == expected
    assert "num_classes=... makes one" in str(ours.load_report)


def test_timms_beit_is_refused_by_the_name_of_its_bias() -> None:
    state = timm.create_model("beit_base_patch16_224", depth=1, num_classes=5).state_dict()
    with pytest.raises(PatchloomError, match=r"relative position bias .*timm:NAME:FILE"):
        patchloom.load(state)


def test_an_average_that_is_normalised_afterwards_is_refused() -> None:
    state = timm.create_model("vit_tiny_patch16_224", depth=1, global_pool="avg").state_dict()
    with pytest.raises(PatchloomError, match=r"fc_norm\.\*"):
        patchloom.load(state)


def encoder(**options) -> nn.Module:
    """A small vision transformer of timm without a head: what all three methods train."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1}
    return stir(timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes, **options)).eval()


def check_encoder(ours: nn.Module, theirs: nn.Module) -> None:
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(ours.features(images).tokens, theirs.forward_features(images), 1e-5)


def with_prefix(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


DINO_HEAD = {
    "mlp.0.weight": torch.randn(16, 64),
    "mlp.0.bias": torch.randn(16),
    "last_layer.weight_g": torch.ones(32, 1),
    "last_layer.weight_v": torch.randn(32, 16),
}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_dino_gives_its_teacher(prefix: str, tmp_path) -> None:
    teacher, student = encoder(), encoder()
    for parameter in student.parameters():
        parameter.data.mul_(0.5)
    networks = {
        key: with_prefix(f"{prefix}backbone.", network.state_dict()) | with_prefix(f"{prefix}head.", DINO_HEAD)
        for key, network in (("student", student), ("teacher", teacher))
    }
    rest = {"epoch": 3, "args": argparse.Namespace(arch="vit_small"), "dino_loss": {"center": torch.zeros(1, 32)}}
    torch.save({**networks, "optimizer": {"state": {}}, **rest}, tmp_path / "checkpoint.pth")
    ours = patchloom.load(tmp_path / "checkpoint.pth", heads=1)
    check_encoder(ours, teacher)
    assert set(ours.load_report.ignored) == set(with_prefix("head.", DINO_HEAD))
    assert "head.last_layer.weight_g: part of DINO's projection head" in str(ours.load_report)


def test_a_pretraining_file_of_mae_gives_its_encoder(tmp_path) -> None:
    theirs = encoder()
    beside = {
        "mask_token": torch.randn(1, 1, 16),
        "decoder_embed.weight": torch.randn(16, 64),
        "decoder_pos_embed": torch.randn(1, 17, 16),
        "decoder_blocks.0.norm1.weight": torch.ones(16),
        "decoder_pred.bias": torch.zeros(192),
    }
    torch.save({"model": theirs.state_dict() | beside, "epoch": 1}, tmp_path / "mae.pth")
    ours = patchloom.load(tmp_path / "mae.pth", heads=1)
    check_encoder(ours, theirs)
    assert set(ours.load_report.ignored) == set(beside)
    assert patchloom.load(tmp_path / "mae.pth", heads=1, num_classes=7)(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def as_beit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of a plain vision transformer with BeiT's names, which has no bias of keys."""
    renamed = {}
    for name, tensor in state.items():
        if name.endswith("attn.qkv.bias"):
            attention = name.removesuffix("qkv.bias")
            renamed[f"{attention}q_bias"], _, renamed[f"{attention}v_bias"] = tensor.chunk(3)
        else:
            renamed[name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = tensor
    return renamed


def test_a_file_of_beit_with_absolute_positions_gives_its_encoder() -> None:
    theirs = encoder(init_values=0.1)
    for block in theirs.blocks:
        block.attn.qkv.bias.data[64:128] = 0
    beside = {"mask_token": torch.randn(1, 1, 64), "lm_head.weight": torch.randn(8, 64), "lm_head.bias": torch.zeros(8)}
    state = {"model": as_beit(theirs.state_dict()) | beside}
    ours = patchloom.load(state, heads=1)
    check_encoder(ours, theirs)
    assert set(ours.load_report.ignored) == set(beside)
    lacking = {name: tensor for name, tensor in state["model"].items() if name != "blocks.1.attn.v_bias"}
    with pytest.raises(PatchloomError, match=r"blocks\.1\.attn\.v_bias"):
        patchloom.load(lacking, heads=1)


def test_beits_pretraining_file_with_a_shared_relative_bias_is_refused() -> None:
    state = as_beit(encoder(init_values=0.1).state_dict())
    state["rel_pos_bias.relative_position_bias_table"] = torch.zeros(52, 1)
    with pytest.raises(PatchloomError, match="relative position bias"):
        patchloom.load(state, heads=1)


@pytest.mark.parametrize("layout", ["official", "timm", "patchloom"])
def test_a_network_without_a_head_is_saved_in_every_layout(layout: str, tmp_path) -> None:
    model = stir(patchloom.create_model("deit_nano", num_classes=1, head="none")).eval()
    patchloom.save(model, tmp_path / "trunk.safetensors", layout=layout)
    loaded = [
        patchloom.load(tmp_path / "trunk.safetensors"),
        patchloom.load(load_file(tmp_path / "trunk.safetensors"), heads=3),
    ]
    images = torch.randn(2, 3, 32, 32)
    for again in loaded:
        assert again.config == model.config
        assert torch.equal(again(images), model.embed(images))
