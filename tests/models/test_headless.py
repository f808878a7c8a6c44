"""num_classes=0: a network without a head, whose logits are its embedding."""

from __future__ import annotations

import pytest
import torch

import patchloom
from patchloom.models.embedding import without_head

NAMES = ["deit_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


@pytest.mark.parametrize("name", NAMES)
def test_a_network_without_a_head_gives_its_embedding(name: str, tmp_path) -> None:
    model = patchloom.create_model(name, num_classes=0).eval()
    images = torch.randn(2, 3, *model.config.img_size)
    assert "head" not in patchloom.parameter_roles(model).values()
    assert torch.equal(model(images), model.embed(images))
    assert torch.allclose(patchloom.fuse(model)(images), model(images), atol=1e-5)
    patchloom.save(model, tmp_path / "trunk.safetensors")
    again = patchloom.load(tmp_path / "trunk.safetensors")
    assert again.config == model.config
    assert torch.equal(again.embed(images), model.embed(images))
    assert patchloom.complexity(model.config).params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_head_can_be_added_and_taken_away(name: str) -> None:
    model = patchloom.create_model(name, num_classes=0).eval()
    images = torch.randn(2, 3, *model.config.img_size)
    before = model.embed(images)
    model.reset_head(5)
    assert model(images).shape == (2, 5)
    assert torch.equal(model.embed(images), before)
    assert without_head(model).config.num_classes == 0
    assert torch.equal(model(images), before)


def test_one_query_per_class_needs_classes() -> None:
    with pytest.raises(patchloom.PatchloomError, match="num_classes must be at least 1"):
        patchloom.create_model("patchconvnet_s20", num_classes=0, queries="per_class")
