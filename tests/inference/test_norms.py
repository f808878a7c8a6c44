"""Branch norms against timm and against the definition, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import patchloom
from conftest import stir
from patchloom.compat import import_timm
from patchloom.inference.norms import branch_norms
from patchloom.layers.residual import Residual
from patchloom.models.network import Network

# name, options: with self-attention, class-attention, layers over patches, convolutions of maps, parallel branches
NETWORKS = {
    "deit": ("deit_nano", {"depth": 2}),
    "distilled": ("deit_nano", {"depth": 2, "distilled": True}),
    "late class token": ("deit_nano", {"depth": 2, "class_token_at": 1}),
    "averaged": ("deit_nano", {"depth": 2, "aggregation": "average"}),
    "cait": ("cait_nano", {"depth": 2, "class_depth": 2}),
    "resmlp": ("resmlp_nano", {"depth": 2}),
    "class-MLP": ("resmlp_nano", {"depth": 2, "aggregation": "class_mlp"}),
    "patchconvnet": ("patchconvnet_nano", {"depth": 2}),
    "one query per class": ("patchconvnet_nano", {"depth": 2, "queries": "per_class"}),
    "parallel": ("vit_tiny_2x2", {"patch_size": 4, "dim": 24, "heads": 3}),
    "gated": ("deit_nano", {"depth": 2, "scale": "exclusive_gate"}),
}


def make(kind: str) -> Network:
    name, options = NETWORKS[kind]
    network = stir(patchloom.create_model(name, num_classes=3, img_size=16, **options)).eval()
    assert isinstance(network, Network)
    return network


def ratios(added: Tensor, read: Tensor) -> Tensor:
    return (added.double() ** 2).sum(dim=-1).sqrt() / (read.double() ** 2).sum(dim=-1).sqrt()


def test_the_last_block_of_deit_is_measured_over_all_tokens_as_timm_computes_them(tmp_path: Path) -> None:
    network = stir(patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=3)).eval()
    patchloom.save(network, tmp_path / "timm.safetensors", layout="timm")
    twin = (
        import_timm()
        .models.VisionTransformer(img_size=16, patch_size=4, embed_dim=96, depth=3, num_heads=3, num_classes=3)
        .eval()
    )
    twin.load_state_dict(load_file(tmp_path / "timm.safetensors"))
    x = torch.randn(4, 3, 16, 16)
    want: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        block = twin.blocks[int(name.split(".")[1])]
        update = block.attn(block.norm1(inputs))
        want[f"{name}.mixing.branches.0"] = ratios(update, inputs)
        want[f"{name}.ffn.branches.0"] = ratios(block.mlp(block.norm2(inputs + update)), inputs + update)

    for i, block in enumerate(twin.blocks):
        block.register_forward_pre_hook(lambda _, inputs, i=i: note(f"blocks.{i}", inputs[0]))
    with torch.no_grad():
        twin(x)
    got = branch_norms(network, x)
    assert list(got) == list(want)
    for name, per_token in want.items():
        assert got[name] == pytest.approx(float(per_token.mean()), rel=1e-4), name
    class_token = float(want["blocks.2.ffn.branches.0"][:, 0].mean())
    assert abs(got["blocks.2.ffn.branches.0"] / class_token - 1) > 0.02, "the two are alike: this test says nothing"


@pytest.mark.parametrize("kind", NETWORKS)
def test_branch_norms_are_the_mean_over_tokens_of_the_ratio_of_norms(kind: str) -> None:
    """Every branch is computed again from what its residual was given."""
    network, x = make(kind), torch.randn(3, 3, 16, 16)
    want: dict[str, float] = {}

    def note(name: str, residual: Residual, inputs: tuple) -> None:
        read, queries = inputs[0], inputs[1] if len(inputs) > 1 else None
        updated = read if queries is None else read[:, :queries]
        for i, branch in enumerate(residual.branches):
            update = branch.fn(branch.norm(read)) if queries is None else branch.fn(branch.norm(read), queries)
            want[f"{name}.branches.{i}"] = float(ratios(branch.scale.of(update), updated).mean())

    hooks = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: note(name, module, inputs))
        for name, module in network.named_modules()
        if isinstance(module, Residual)
    ]
    with torch.no_grad():
        network.features(x)
    for hook in hooks:
        hook.remove()
    assert len(want) == sum(len(m.branches) for m in network.modules() if isinstance(m, Residual))
    assert branch_norms(network, x) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("kind", ["distilled", "patchconvnet"])
def test_a_network_in_training_is_measured_in_eval_mode_and_left_as_it_was(kind: str) -> None:
    network, x = make(kind), torch.randn(3, 3, 16, 16)
    want = branch_norms(network, x)
    network.train()
    network.blocks[0].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    assert branch_norms(network, x) == want
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())
