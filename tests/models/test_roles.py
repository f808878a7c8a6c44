"""Roles and depths of the parameters of any module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchloom
from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.models.embedding import EmbeddingConfig
from patchloom.models.registry import build
from patchloom.models.roles import layer_depths, parameter_roles, tuned_parameters


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


class Own(nn.Module):
    """A user's network: a token, a stack, a norm that only its name tells, a head that is not registered last."""

    class RootNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    class PreNorm(nn.Module):
        """Called a norm, and a whole branch."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(4), nn.Linear(4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.role = "student"  # another meaning of the word
        self.token = nn.Parameter(torch.zeros(4))
        self.classifier = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.layers = nn.ModuleList([self.PreNorm(), self.PreNorm()])
        self.last = self.RootNorm()


def test_roles_of_a_users_module() -> None:
    roles = parameter_roles(Own())
    assert list(roles) == names(Own())
    assert roles["token"] == "other"
    assert {role for name, role in roles.items() if name.startswith("classifier.")} == {"head"}  # its norm too
    assert roles["last.gain"] == roles["layers.0.norm.weight"] == "norm"
    assert roles["layers.0.fn.weight"] == "other"


def test_the_last_linear_is_a_head_only_where_it_is_the_last_layer() -> None:
    ends = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert parameter_roles(ends)["4.weight"] == "head"
    assert parameter_roles(ends)["0.weight"] == "other"
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    assert "head" not in parameter_roles(trunk).values()
    assert parameter_roles(nn.Linear(2, 2)) == {"weight": "head", "bias": "head"}


def test_declared_roles_hold_inside_other_modules() -> None:
    """In a module of a user and in a ModuleDict, with prefixed names."""
    network = patchloom.create_model("cait_nano", depth=2, distilled=True)
    both = nn.ModuleDict({"student": network, "projector": nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))})
    roles = parameter_roles(both)
    assert list(roles) == names(both)
    for name, role in parameter_roles(network).items():
        assert roles[f"student.{name}"] == role
        assert role != "other"
    assert (roles["projector.0.weight"], roles["projector.2.weight"]) == ("other", "head")


@pytest.mark.parametrize(
    ("name", "head"),
    [("resnet18", "fc."), ("test_vit", "head."), ("test_convnext", "head.fc."), ("test_efficientnet", "classifier.")],
)
def test_roles_of_timm_networks(name: str, head: str) -> None:
    model = import_timm().create_model(name, num_classes=7)
    roles = parameter_roles(model)
    assert list(roles) == names(model)
    assert {key for key, role in roles.items() if role == "head"} == {key for key in roles if key.startswith(head)}
    norms = {key for key, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    assert {key for key, role in roles.items() if role == "norm"} == {
        key for key in roles if key.rpartition(".")[0] in norms
    }
    headless = import_timm().create_model(name, num_classes=0)
    assert "head" not in parameter_roles(headless).values()


def test_what_is_not_a_module_is_refused() -> None:
    for ask in (parameter_roles, layer_depths):
        with pytest.raises(PatchloomError, match="dict"):
            ask({})  # type: ignore[arg-type]


def test_tuning_a_network_without_attention_names_it() -> None:
    with pytest.raises(PatchloomError, match="Own has no attention"):
        tuned_parameters(Own(), "attention")


@pytest.mark.parametrize("name", ["deit_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"])
def test_depths_of_our_networks(name: str) -> None:
    model = patchloom.create_model(name, depth=4)
    depths = layer_depths(model)
    assert list(depths) == names(model)
    for key, depth in depths.items():
        part, index, *_ = [*key.split("."), ""]
        want = {"stem": 0, "class_token": 0, "positions": 0, "blocks": 1 + int(index) if index.isdigit() else None}
        assert depth == want.get(part, 5), key
    wrapped = layer_depths(torch.optim.swa_utils.AveragedModel(model))
    assert list(wrapped.values()) == list(depths.values())


def test_depths_of_a_timm_vit_are_timms_own() -> None:
    timm = import_timm()
    model = timm.create_model("vit_tiny_patch16_224", depth=3)
    depths = layer_depths(model)
    theirs = timm.models.group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    for key, depth in depths.items():
        after = key.startswith(("norm", "head"))  # timm counts the last norm with the last block
        assert depth == (4 if after else theirs[key]), key


def test_depths_of_other_modules() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Linear(4, 2))
    assert [layer_depths(plain)[f"{i}.weight"] for i in (0, 2, 3)] == [0, 1, 2]
    own = layer_depths(Own())
    assert (own["token"], own["classifier.0.weight"], own["layers.1.fn.weight"], own["last.gain"]) == (0, 3, 2, 3)


def depths_by_part(module: nn.Module, length: int) -> dict[str, set[int]]:
    """The depths of the parameters that share the first `length` steps of their names."""
    found: dict[str, set[int]] = {}
    for name, depth in layer_depths(module).items():
        found.setdefault(".".join(name.split(".")[:length]), set()).add(depth)
    return found


@pytest.mark.parametrize("name", ["deit_nano", "cait_nano"])
def test_both_heads_have_one_depth_after_a_single_block(name: str) -> None:
    depths = depths_by_part(patchloom.create_model(name, depth=1, distilled=True), 1)
    assert depths["stem"] == {0}
    assert depths["blocks"] == {1}
    assert depths["norm"] == depths["head"] == depths["head_distill"] == {2}


def test_depths_reach_the_blocks_of_a_trunk_inside() -> None:
    trunk = patchloom.create_model("deit_nano", depth=3)
    config = EmbeddingConfig(trunk=trunk.config, trunk_dim=trunk.config.dim, classifier=True)
    network = build(config)
    inside, plain = layer_depths(network), layer_depths(trunk)
    for name, depth in inside.items():
        assert depth == plain.get(name.removeprefix("trunk."), 4), name  # projector and classifier come after


def test_depths_of_an_encoder_and_a_decoder_follow_each_other() -> None:
    network = patchloom.create_model("resmlp_mt_nano", depth=2)
    lists = depths_by_part(network, 2)
    assert [lists[f"{part}.{i}"] for part in ("encoder", "decoder") for i in (0, 1)] == [{1}, {2}, {3}, {4}]
    assert lists["embedding.weight"] == {0}
    assert lists["decoder_norm.weight"] == {5}
    torch_own = depths_by_part(nn.Transformer(8, 2, 2, 2, 8, batch_first=True), 3)
    assert [torch_own[f"{part}.layers.{i}"] for part in ("encoder", "decoder") for i in (0, 1)] == [{1}, {2}, {3}, {4}]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("resnet18", ["layer1", "layer2", "layer3", "layer4"]),
        ("regnetx_002", ["s1", "s2", "s3", "s4"]),
        ("vgg11", [f"features.{i}" for i in (0, 3, 6, 8, 11, 13, 16, 18)]),
        ("pit_ti_224", [f"transformers.{i}.blocks.{j}" for i, count in enumerate((2, 6, 4)) for j in range(count)]),
    ],
)
def test_depths_of_stacks_with_other_names(name: str, stages: list[str]) -> None:
    model = import_timm().create_model(name)
    depths = layer_depths(model)
    for i, stage in enumerate(stages):
        assert {depth for key, depth in depths.items() if key.startswith(f"{stage}.")} == {i + 1}, stage
    first, last = next(iter(depths)), next(reversed(depths))
    assert depths[last] == max(depths.values()) == len(stages) + 1
    assert depths[first] == (1 if name == "vgg11" else 0)


def test_depths_of_a_convnet_under_attention_pooling() -> None:
    depths = depths_by_part(patchloom.create_model("resnet18_attention_pool", num_classes=2), 3)
    assert [depths[f"stem.trunk.layer{i}"] for i in range(1, 5)] == [{1}, {2}, {3}, {4}]
    assert depths["stem.trunk.conv1"] == depths["stem.trunk.bn1"] == {0}
    assert depths["pool.0.mixing"] == depths["head.weight"] == {5}


def test_in_a_module_dict_all_end_at_the_same_depth() -> None:
    both = nn.ModuleDict({"trunk": patchloom.create_model("deit_nano", depth=3), "head": nn.Linear(96, 10)})
    depths = layer_depths(both)
    assert list(depths) == names(both)
    assert depths["head.weight"] == depths["trunk.head.weight"] == 4
    assert depths["trunk.stem.proj.weight"] == 0
