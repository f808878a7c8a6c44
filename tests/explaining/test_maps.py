"""Maps against independent computations: the attention itself, naive products, captum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam, Occlusion
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from conftest import stir
from patchloom import PatchloomError
from patchloom.explaining.baselines import grad_cam, network_input, occlusion
from patchloom.explaining.maps import Outputs, available_maps, make_maps
from patchloom.models.features import TokenLayout
from patchloom.models.network import Network

SIZE = (16, 24)  # 4 x 6 patches
BOTH = ("grad-cam", "occlusion")
NETWORKS = {
    "cait": ("cait_nano", {}, ("class-attention", "rollout", *BOTH)),
    "cait without its token among the keys": (
        "cait_nano",
        {"class_in_keys": False},
        ("class-attention", "rollout", *BOTH),
    ),
    "deit": ("deit_nano", {}, ("class-attention", "rollout", *BOTH)),
    "distilled": ("deit_nano", {"distilled": True}, ("class-attention", "rollout", *BOTH)),
    "late class token": ("deit_nano", {"class_token_at": 1}, ("class-attention", "rollout", *BOTH)),
    "averaged": ("deit_nano", {"aggregation": "average"}, ("rollout", *BOTH)),
    "parallel": ("vit_tiny_2x2", {"patch_size": 4, "dim": 24, "heads": 3}, ("class-attention", "rollout", *BOTH)),
    "resmlp": ("resmlp_nano", {}, ("cross-patch", *BOTH)),
    "class-MLP": ("resmlp_nano", {"aggregation": "class_mlp"}, ("cross-patch", *BOTH)),
    "resmlp with convolutions": ("resmlp_nano", {"mixing": "depthwise"}, BOTH),
    "patchconvnet": ("patchconvnet_nano", {}, ("pooling", *BOTH)),
    "one query a class": ("patchconvnet_nano", {"queries": "per_class"}, ("per-class", *BOTH)),
    "averaged convolutions": ("patchconvnet_nano", {"aggregation": "average"}, BOTH),
    "convnet": ("resnet10t_attention_pool", {"img_size": (64, 96)}, ("pooling", *BOTH)),
}
each = pytest.mark.parametrize("kind", NETWORKS)


def make(kind: str) -> Network:
    name, options, _ = NETWORKS[kind]
    depth = {} if "img_size" in options else {"depth": 2}
    network = patchloom.create_model(name, **{"num_classes": 5, "img_size": SIZE, **depth, **options})
    network.preprocessing = dataclasses.replace(network.preprocessing, crop_ratio=1.0)  # pictures stay as they are
    return stir(network).eval()


def picture(network: Network) -> np.ndarray:
    height, width = network.config.img_size
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@each
def test_every_network_gives_its_maps_at_the_size_of_the_crop(kind: str) -> None:
    network, expected = make(kind), NETWORKS[kind][2]
    assert available_maps(network) == expected
    before = network(network_input(network, picture(network))).detach()
    got = patchloom.explain(network, picture(network), faithfulness=False)
    assert {name.split(": ")[0] for name in got.maps} == set(expected)
    for values in got.maps.values():
        assert values.shape == network.config.img_size
        assert values.dtype == np.float32
        assert (values.min(), values.max()) in ((0, 1), (0, 0))
    for values in got.heads.values():
        assert values.shape[1:] == network.config.grid
        assert (values >= 0).all()
        assert (values.sum(axis=(1, 2)) <= 1 + 1e-5).all()
    after = network(network_input(network, picture(network)))
    assert torch.equal(before, after)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@each
def test_a_map_that_cannot_be_is_refused_with_those_that_can(kind: str) -> None:
    network, possible = make(kind), NETWORKS[kind][2]
    impossible = next(name for name in ("per-class", "cross-patch") if name not in possible)
    with pytest.raises(PatchloomError, match=f"{network.config.name} does not support.*{impossible}.*{possible[-1]}"):
        patchloom.explain(network, picture(network), maps=[impossible])


def test_an_unknown_map_is_refused_with_the_nearest() -> None:
    with pytest.raises(PatchloomError, match="Did you mean 'rollout'"):
        patchloom.explain(make("deit"), picture(make("deit")), maps=["rolout"])


@pytest.mark.parametrize(("kind", "prefix"), [("cait", 1), ("distilled", 2), ("parallel", 1), ("late class token", 1)])
def test_heads_are_the_rows_of_the_tokens_without_the_prefix(kind: str, prefix: int) -> None:
    network = make(kind)
    got = patchloom.explain(network, picture(network), maps=["class-attention"], faithfulness=False)
    with torch.no_grad(), patchloom.capture_attention(network) as captured:
        network(network_input(network, picture(network)))
    layers = [name for name in captured if name in got.heads]
    assert len(got.heads) == len(layers) * prefix
    assert len(layers) == {"cait": 2, "distilled": 2, "parallel": 4, "late class token": 1}[kind]
    for name in layers:
        for token, key in enumerate((name, f"{name}: distillation")[:prefix]):
            want = captured[name][0, :, token, prefix:].unflatten(-1, network.config.grid)
            np.testing.assert_array_equal(got.heads[key], want.numpy())
    telling = layers[:1] if kind == "cait" else layers[-network.config.branches :]
    mean = torch.from_numpy(np.mean([got.heads[name].mean(axis=0) for name in telling], axis=0))
    np.testing.assert_allclose(got.maps["class-attention"], normalised(mean, network), atol=1e-5)


@pytest.mark.parametrize("kind", ["distilled", "late class token", "parallel", "averaged", "cait"])
def test_rollout_is_the_naive_product(kind: str) -> None:
    """Token by token, in float64: what reaches token i is its own and, through each attention, that of the others."""
    network = make(kind)
    prefix, height, width = network.token_layout
    with torch.no_grad(), patchloom.capture_attention(network) as captured:
        network(network_input(network, picture(network)))
    maps = {name: weights[0].mean(dim=0).double().numpy() for name, weights in captured.items()}
    patches = [{j: 1.0} for j in range(height * width)]
    state: list[dict[int, float]] = [{} for _ in range(prefix)] + patches  # token -> how much of each patch it holds
    for block in [f"{stage}.{i}." for stage in ("blocks", "pool") for i in range(len(getattr(network, stage)))]:
        branches = [weights for name, weights in maps.items() if name.startswith(block)]
        new = list(state)
        for i in range(branches[0].shape[0]):
            shift = prefix if len(branches[0]) == len(branches[0][0]) == height * width else 0  # before tokens joined
            parts = [(1.0, state[i + shift])]
            for weights in branches:
                first = len(state) - weights.shape[1]
                parts += [(weights[i, j], state[first + j]) for j in range(weights.shape[1])]
            new[i + shift] = _sum(parts, 1 + len(branches))
        state = new
    got = patchloom.explain(network, picture(network), maps=["rollout"], faithfulness=False)
    rows = state[:prefix] or [_sum([(1.0, row) for row in state], len(state))]
    for row, name in zip(rows, ("rollout", "rollout: distillation"), strict=False):
        want = torch.tensor([row.get(j, 0.0) for j in range(height * width)]).view(height, width)
        np.testing.assert_allclose(got.maps[name], normalised(want, network), atol=1e-4)


def _sum(parts: list[tuple[float, dict[int, float]]], divisor: int) -> dict[int, float]:
    total: dict[int, float] = {}
    for weight, row in parts:
        for j, value in row.items():
            total[j] = total.get(j, 0.0) + weight * value / divisor
    return total


def normalised(values: Tensor, network: Network) -> np.ndarray:
    large = F.interpolate(values[None, None].double(), network.config.img_size, mode="bilinear")[0, 0].numpy()
    return (large - large.min()) / (large.max() - large.min())


def test_a_patch_that_no_row_reads_is_dark() -> None:
    network = make("resmlp")
    with torch.no_grad():
        for block in network.blocks:
            block.mixing.branches[0].fn.weight[:, 8] = 0
    x = network_input(network, picture(network))
    outputs = Outputs(network, x, TokenLayout(0, 4, 6), torch.zeros(5), {}, (0,), 0)
    values = make_maps(outputs, ["cross-patch"])["cross-patch"].flatten()
    assert values[8] == 0
    assert (values[torch.arange(24) != 8] > 0).all()


def test_cross_patch_map_leaves_out_the_shift_after_a_branch() -> None:
    """The shift of the last mixing reaches no later mixing: it may change the logits, not what patches give."""
    name, options, _ = NETWORKS["resmlp"]
    network = stir(patchloom.create_model(name, num_classes=5, img_size=SIZE, depth=2, post="affine", **options)).eval()
    x = network_input(network, picture(network))
    outputs = Outputs(network, x, network.token_layout, torch.zeros(5), {}, (0,), 0)
    before, logits = make_maps(outputs, ["cross-patch"])["cross-patch"], network(x)
    with torch.no_grad():
        network.blocks[-1].mixing.branches[0].scale.beta += 3
    assert not torch.allclose(network(x), logits)
    assert torch.equal(make_maps(outputs, ["cross-patch"])["cross-patch"], before)


def test_one_query_a_class_gives_one_map_a_likely_class() -> None:
    network = make("one query a class")
    network.class_names = tuple("abcde")
    got = patchloom.explain(network, picture(network), target="e", faithfulness=False)
    likely = [row["class"] for row in got.predictions if row["probability"] >= 0.1]
    assert [name for name in got.maps if name.startswith("per-class")] == [
        f"per-class: {name}" for name in dict.fromkeys([*likely, "e"])
    ]
    assert not np.array_equal(got.maps["per-class: e"], got.maps[f"per-class: {likely[0]}"])


# Baselines, against captum


class Probe(nn.Module):
    """A block whose patches pass through an identity as (B, D, height, width), where captum can see them."""

    def __init__(self, block: nn.Module, grid: tuple[int, int], before: bool) -> None:
        super().__init__()
        self.block, self.grid, self.before = block, grid, before
        self.seen = nn.Identity()

    def show(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            return self.seen(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        prefix = x.shape[1] - self.grid[0] * self.grid[1]
        shown = self.seen(x[:, prefix:].transpose(1, 2).unflatten(2, self.grid))
        return torch.cat([x[:, :prefix], shown.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        return self.block(self.show(x), queries) if self.before else self.show(self.block(x, queries))


@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind != "convnet"])
def test_grad_cam_is_captums(kind: str) -> None:
    network = make(kind)
    x = network_input(network, picture(network))
    got = grad_cam(network, x, 3)
    network.blocks[-1] = Probe(network.blocks[-1], network.config.grid, network.join_at is not None)
    want = LayerGradCam(network, network.blocks[-1].seen).attribute(x, target=3, relu_attributions=True)
    torch.testing.assert_close(got, want[0, 0].detach(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("kind", "size"), [("cait", SIZE), ("patchconvnet", (40, 60)), ("resmlp", (16, 64))])
def test_occlusion_is_captums(kind: str, size: tuple[int, int]) -> None:
    name, options, _ = NETWORKS[kind]
    network = stir(patchloom.create_model(name, num_classes=5, img_size=size, depth=2, **options)).eval()
    x = network_input(network, picture(network))
    got = occlusion(network, x, 2)
    windows = {SIZE: ((4, 4), (4, 4)), (40, 60): ((8, 12), (4, 8)), (16, 64): ((4, 12), (4, 8))}[size]
    (high, wide), steps = windows
    with torch.no_grad():
        want = Occlusion(lambda images: network(images).log_softmax(-1)).attribute(
            x, (3, high, wide), strides=(3, *steps), target=2, baselines=0
        )
    pooled = F.adaptive_avg_pool2d(want[0, :1].float().relu(), got.shape)[0]
    torch.testing.assert_close(got, pooled, atol=1e-5, rtol=1e-4)
