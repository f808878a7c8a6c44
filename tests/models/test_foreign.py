"""timm:NAME: a network of timm with the outer promises of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchloom
from conftest import assert_close
from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.models.convnet import count_trunk
from patchloom.models.foreign import ForeignConfig, ForeignNetwork
from patchloom.models.heads import MLPHead
from patchloom.models.registry import build, config_from_json, find_config
from patchloom.models.roles import parameter_roles

NAMES = ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"]


def make(name: str, **options: Any) -> ForeignNetwork:
    torch.manual_seed(0)
    model = patchloom.create_model(f"timm:{name}", **{"num_classes": 5, **options})
    assert isinstance(model, ForeignNetwork)
    return model.eval()


def images(model: ForeignNetwork, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, model.config.in_chans, *model.config.img_size)


@pytest.mark.parametrize("name", NAMES)
def test_logits_tensors_and_preprocessing_are_timms(name: str) -> None:
    timm = import_timm()
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5).eval()
    model = make(name)
    assert [key.removeprefix("network.") for key in model.state_dict()] == list(theirs.state_dict())
    model.load_state_dict(dict(zip(model.state_dict(), theirs.state_dict().values(), strict=True)))
    x = images(model)
    with torch.no_grad():
        assert torch.equal(model(x), theirs(x))
    data = timm.data.resolve_model_data_config(theirs)
    assert (model.preprocessing.mean, model.preprocessing.std) == (data["mean"], data["std"])
    assert model.preprocessing.crop_ratio == data["crop_pct"]
    assert model.preprocessing.img_size == model.config.img_size == data["input_size"][1:]


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_and_a_head_to_replace(name: str) -> None:
    model = make(name)
    x = images(model)
    with torch.no_grad():
        vector, logits = model.embed(x), model(x)
        assert vector.ndim == 2
        (head,) = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 5]
        assert_close(head(vector), logits, 1e-5)
        model.class_names = tuple("abcde")
        model.reset_head(3)
        assert model(x).shape == (2, 3)
        assert_close(model.embed(x), vector, 1e-6)
    assert model.config.num_classes == 3
    assert model.class_names is None


@pytest.mark.parametrize(
    ("name", "layout"), [("test_resnet", (0, 5, 5)), ("test_vit", (1, 10, 10)), ("mixer_s32_224", (0, 7, 7))]
)
def test_features_are_a_map_or_tokens(name: str, layout: tuple[int, int, int]) -> None:
    model = make(name)
    features = model.features(images(model))
    assert features.layout == layout
    assert features.tokens.shape[1] == layout[0] + layout[1] * layout[2]
    assert features.grid.shape[2:] == layout[1:]


def test_the_map_of_a_convnet_is_read_row_by_row() -> None:
    model = make("test_resnet")
    x = images(model)
    with torch.no_grad():
        assert torch.equal(model.features(x).grid, model.network.forward_features(x))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_stages_by_number(name: str) -> None:
    model = make(name)
    x, count = images(model), len(model.network.feature_info)
    last, first = model.features(x, blocks=[-1, 0])
    with torch.no_grad():
        theirs = model.network.forward_intermediates(x, intermediates_only=True, output_fmt="NCHW")
    assert_close(last.grid.detach(), theirs[-1], 1e-6)
    assert_close(first.grid.detach(), theirs[0], 1e-6)
    with pytest.raises(PatchloomError, match=f"has {count} of them"):
        model.features(x, blocks=[count])


def test_what_a_foreign_network_cannot_do_is_said() -> None:
    model = make("test_resnet")
    x = images(model)
    with pytest.raises(PatchloomError, match="neither mask nor keep"):
        model.features(x, keep=torch.zeros(2, 1).long())
    with pytest.raises(PatchloomError, match="3 channels"):
        model(x[:, :2])
    with pytest.raises(PatchloomError, match="uint8"):
        model(x.to(torch.uint8))
    with pytest.raises(PatchloomError, match=r"160 x 160, not 64 x 64.*img_size=\(64, 64\)"):
        make("test_vit")(torch.zeros(1, 3, 64, 64))
    with pytest.raises(PatchloomError, match="needs one of patchloom's own"):
        patchloom.explain(model, x[0])


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_channels_can_be_chosen(name: str) -> None:
    model = make(name, img_size=(64, 96), in_chans=1)
    assert model(torch.zeros(2, 1, 64, 96)).shape == (2, 5)
    assert model.preprocessing.img_size == (64, 96)
    assert len(model.preprocessing.mean) == 1


def test_options_go_to_timm_and_unknown_ones_are_refused() -> None:
    model = make("test_vit", depth=2, drop_path=0.2, dropout=0.1)
    assert len(model.network.blocks) == 2
    assert model.network.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    assert dict(model.config.options) == {"depth": 2}
    with pytest.raises(PatchloomError, match="no option 'banana'"):
        make("test_resnet", banana=1)
    with pytest.raises(PatchloomError, match="no option 'drop_path'"):
        make("vgg11", drop_path=0.1)
    with pytest.raises(PatchloomError, match="below 1"):
        make("test_resnet", drop_path=1.5)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(PatchloomError, match=r"no model 'resnet5'.*Did you mean"):
        patchloom.create_model("timm:resnet5")
    with pytest.raises(PatchloomError, match=r"load\('timm:resnet18:a.pth'\)"):
        patchloom.create_model("timm:resnet18:a.pth")


@pytest.mark.parametrize("name", NAMES)
def test_an_mlp_takes_the_place_of_the_classifier(name: str, tmp_path: Path) -> None:
    model = make(name, head="mlp")
    linear = make(name)
    x = images(model)
    heads = {parameter for parameter, role in parameter_roles(model).items() if role == "head"}
    assert len(heads) == 6  # of two linear layers and the BatchNorm between them
    with torch.no_grad():
        vector, logits = model.embed(x), model(x)
        assert vector.shape == linear.embed(x).shape
        (head,) = [module for module in model.modules() if isinstance(module, MLPHead)]
        assert_close(head(vector), logits, 1e-5)
        patchloom.save(model, tmp_path / "mlp.safetensors")
        assert_close(patchloom.load(tmp_path / "mlp.safetensors")(x), logits, 1e-5)
    model.reset_head(3)
    assert model(x).shape == (2, 3)
    assert isinstance(model.network.get_classifier(), MLPHead)
    model.network.reset_classifier(0)
    assert_close(model.embed(x), vector, 1e-5)


def test_a_config_is_plain_json() -> None:
    config = find_config("timm:test_vit").replace(num_classes=3, img_size=(64, 64), depth=2, patch_size=[8, 8])
    assert isinstance(config, ForeignConfig)
    again = config_from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert hash(again) == hash(config)
    assert build(again)(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


def test_resnet50_counts() -> None:
    """Parameters and MACs are those of the counted trunk and one Linear, independent of the counter used here."""
    cost = patchloom.complexity("timm:resnet50")
    params, macs, activations = count_trunk("resnet50")
    assert cost.params == 25_557_032 == params + 2049 * 1000
    assert cost.macs == macs + 2048 * 1000
    assert cost.activations == activations + 1000


def test_attention_is_counted_as_in_our_own_networks() -> None:
    theirs = patchloom.complexity("timm:deit_tiny_patch16_224")
    ours = patchloom.complexity("deit_tiny")
    assert theirs.params == ours.params
    assert theirs.macs == ours.macs


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_gradient_checkpointing_is_timms(name: str) -> None:
    model = make(name).train()
    x = images(model)
    torch.manual_seed(0)
    model(x).sum().backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing = True
    assert model.gradient_checkpointing
    assert model.network.grad_checkpointing
    model(x).sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[key], rtol=1e-4, atol=1e-6, msg=key)


def test_a_fused_copy_is_an_eval_copy() -> None:
    model = make("test_resnet").train()
    copy = patchloom.fuse(model)
    assert model.training
    assert not copy.training
    assert not any(p.requires_grad for p in copy.parameters())
    x = images(model)
    assert_close(copy(x), model.eval()(x).detach(), 1e-6)
    with pytest.raises(PatchloomError, match="patchloom's own"):
        patchloom.fuse(model, int8=True)


def test_a_norm_without_parameters_still_learns_its_statistics() -> None:
    model = make("test_resnet")
    model.network.bn1 = nn.BatchNorm2d(model.network.bn1.num_features, affine=False)
    model.train()
    assert model.network.bn1.training
    model.network.layer1.requires_grad_(False)
    model.train()
    assert not any(m.training for m in model.network.layer1.modules() if isinstance(m, nn.BatchNorm2d))


def test_without_timm_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(PatchloomError, match="pip install"):
        patchloom.create_model("timm:resnet18")
