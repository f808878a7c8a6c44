"""Networks without a head: `forward` is `embed`, heads can be added, files say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patchloom
from patchloom.models.registry import build, config_from_json, find_config

FAMILIES = ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


def headless(name: str, **options: Any) -> Any:
    return build(find_config(name).replace(depth=2, **options).without_head()).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_is_embed_and_nothing_is_a_head(name: str) -> None:
    network, x = headless(name), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network(x), network.embed(x))
        torch.testing.assert_close(patchloom.fuse(network).embed(x), network.embed(x), atol=1e-5, rtol=1e-4)
    assert "head" not in patchloom.parameter_roles(network).values()
    assert network.config.headless
    assert config_from_json(network.config.to_json()) == network.config


def test_a_network_with_two_tokens_gives_their_mean() -> None:
    network, x = headless("deit_nano", distilled=True), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network(x), network.embed(x))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_added(name: str) -> None:
    network = headless(name)
    network.reset_head(5)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert (network.config.head, network.config.num_classes) == ("linear", 5)


def test_a_file_keeps_it_and_loading_with_classes_adds_a_head(tmp_path: Path) -> None:
    network, x = headless("deit_nano"), torch.randn(2, 3, 32, 32)
    patchloom.save(network, tmp_path / "trunk.safetensors")
    again = patchloom.load(tmp_path / "trunk.safetensors")
    with torch.no_grad():
        assert torch.equal(again(x), network(x))
        larger = patchloom.load(tmp_path / "trunk.safetensors", img_size=48)
        assert larger(torch.randn(1, 3, 48, 48)).shape == (1, 96)
    classes = patchloom.load(tmp_path / "trunk.safetensors", num_classes=4)
    assert classes(x).shape == (2, 4)
    assert classes.load_report.reinitialised["head.weight"] == "no head in the file, 4 classes requested"


def test_a_network_of_timm_without_a_classifier() -> None:
    network = build(find_config("timm:resnet18").without_head()).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(network(x), network.embed(x))
    network.reset_head(3)
    assert network(x).shape == (1, 3)
