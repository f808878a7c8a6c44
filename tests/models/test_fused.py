"""A fused copy gives the logits of its network, for every family and option, and is an inference copy only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchloom
from conftest import assert_close, stir
from patchloom.kernels import native
from patchloom.layers.stems import LinearStem
from patchloom.models.fused.columns import AttentionColumn, FusedColumn
from patchloom.models.fused.residual import FusedResidual
from patchloom.training import precision

NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("deit_nano", {}),
    ("deit_nano", {"aggregation": "average"}),
    ("deit_nano", {"class_token_at": 2}),
    ("deit_nano", {"talking_heads": True}),
    ("deit_nano", {"scale": "rezero", "scale_form": "published"}),
    ("deit_nano", {"dim": 40, "heads": 4}),
    *[("deit_nano", {"stem": stem, "stem_norm": norm}) for stem in ("conv", "hmlp") for norm in ("batch", "layer")],
    ("deit_nano", {"stem": "linear_norm"}),
    ("deit_nano", {"stem": "linear_norm", "stem_norm": "layer"}),
    ("deit_nano", {"stem": "linear_gelu"}),
    *[
        ("deit_nano", {"scale": scale})
        for scale in ("rezero", "skipinit", "fixup", "t-fixup", "epsilon", "constant", "shortcut_gate")
    ],
    ("deit_nano", {"scale": "t-fixup", "scale_scalar": True}),
    ("deit_nano", {"dropout": 0.3}),
    *[
        (name, {"norm_position": "post", **options})
        for name, options in (
            ("deit_nano", {}),
            ("deit_nano", {"branches": 2, "scale": "layerscale"}),
            ("deit_nano", {"aggregation": "average"}),
            ("deit_nano", {"class_token_at": 2}),
            ("deit_nano", {"scale": "exclusive_gate"}),
            ("cait_nano", {}),
        )
    ],
    ("deit_tiny_distilled", {"depth": 2}),
    ("deit3_nano", {}),
    ("vit_tiny_2x2", {"patch_size": 8, "depth": 2}),
    ("vit_tiny_2x1", {"stem": "hmlp", "scale": "layerscale", "depth": 2}),
    ("cait_nano", {}),
    ("cait_nano", {"distilled": True}),
    ("cait_nano", {"class_in_keys": False, "class_scale": False}),
    ("cait_xs24", {"depth": 2}),
    ("resmlp_nano", {}),
    ("resmlp_nano", {"norm": "layer"}),
    ("resmlp_nano", {"aggregation": "class_mlp"}),
    *[("resmlp_nano", {"mixing": mixing}) for mixing in ("none", "mlp", "conv", "depthwise", "separable")],
    ("resnet18_attention_pool", {}),
    ("patchconvnet_nano", {}),
    ("patchconvnet_nano", {"dim": 256, "patch_size": 4}),
    ("patchconvnet_nano", {"norm": "batch", "queries": "per_class"}),
    ("patchconvnet_nano", {"aggregation": "average", "stem": "linear"}),
]


def network(name: str, options: dict[str, Any], size: int = 32) -> patchloom.models.network.Network:
    model = stir(patchloom.create_model(name, num_classes=6, img_size=size, **options))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("name", "options"), NETWORKS, ids=str)
def test_it_gives_the_logits_and_features_of_its_network(name: str, options: dict[str, Any], kernels: bool) -> None:
    model, images = network(name, options), torch.randn(3, 3, 32, 32)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        want, features, embedded = model(images), model.features(images).tokens, model.embed(images)
    fused = patchloom.fuse(model, kernels=kernels)
    assert_close(fused(images), want, 1e-5)
    assert_close(fused(images), want, 1e-5)  # nothing of the first call is left over
    assert_close(fused.features(images).tokens, features, 1e-5)
    assert_close(fused.embed(images), embedded, 1e-5)
    whole = patchloom.fuse(model, kernels=kernels, class_token_only=False)
    assert_close(whole(images), want, 1e-5)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(parameter.requires_grad for parameter in model.head.parameters())


SIDE_BY_SIDE = [(f"vit_tiny_2x{count}", scale) for count in (2, 3) for scale in ("none", "layerscale")]


def parallel(name: str, scale: str) -> patchloom.models.network.Network:
    return network(name, {"dim": 48, "heads": 3, "patch_size": 8, "scale": scale})


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("class_token_only", [True, False])
@pytest.mark.parametrize(("name", "scale"), SIDE_BY_SIDE)
def test_parallel_branches_side_by_side(name: str, scale: str, class_token_only: bool, kernels: bool) -> None:
    model = parallel(name, scale)
    branches = len(model.blocks[0].mixing.branches)
    ways = [patchloom.fuse(model, class_token_only, kernels, side_by_side=yes) for yes in (True, False)]
    for fused, count in zip(ways, (1, branches), strict=True):
        column = count == 1 and kernels and native.available()  # all blocks but the last in one call
        blocks = fused.blocks[1:] if column else fused.blocks
        assert isinstance(fused.blocks[0], AttentionColumn) is column
        assert [len(part.branches) for block in blocks for part in block.children()] == [count] * (2 * len(blocks))
        for batch in (1, 3):
            images = torch.randn(batch, 3, 32, 32)
            assert_close(fused(images), model(images).detach(), 1e-5)
            assert_close(fused.features(images).tokens, model.features(images).tokens.detach(), 1e-5)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize(("name", "scale"), SIDE_BY_SIDE)
def test_parallel_branches_side_by_side_with_products_of_bytes(name: str, scale: str) -> None:
    model = parallel(name, scale)
    fused = patchloom.fuse(model, int8=True)
    assert isinstance(fused.blocks[0], AttentionColumn)
    for batch in (1, 3):
        images = torch.randn(batch, 3, 32, 32)
        assert_close(fused(images), model(images).detach(), 0.15)


def test_parallel_branches_that_differ_stay_apart() -> None:
    """Another eps, activation or number of heads; talking heads; post-norm."""
    images = torch.randn(2, 3, 32, 32)
    model = parallel("vit_tiny_2x2", "none")
    model.blocks[0].mixing.branches[1].norm.eps = 1e-2
    model.blocks[0].ffn.branches[1].fn.activation = "relu"
    heads = model.blocks[1].mixing.branches[1].fn
    heads.heads, heads.scale = 6, 8**-0.5
    fused = patchloom.fuse(model)
    assert [len(part.branches) for block in fused.blocks for part in block.children()] == [2, 2, 2, 1]
    assert_close(fused(images), model(images).detach(), 1e-5)
    talking = network("deit_nano", {"branches": 2, "talking_heads": True})
    assert len(patchloom.fuse(talking).blocks[0].mixing.branches) == 2
    assert_close(patchloom.fuse(talking)(images), talking(images).detach(), 1e-5)


def test_parallel_branches_with_another_activation_side_by_side() -> None:
    model, images = parallel("vit_tiny_2x2", "layerscale"), torch.randn(2, 3, 32, 32)
    for branch in model.blocks[0].ffn.branches:
        branch.fn.activation = "relu"
    fused = patchloom.fuse(model)
    assert len(fused.blocks[0].ffn.branches) == 1
    assert_close(fused(images), model(images).detach(), 1e-5)


def test_other_sizes_where_the_network_takes_them() -> None:
    model = network("patchconvnet_nano", {})
    fused, images = patchloom.fuse(model), torch.randn(2, 3, 48, 64)
    assert_close(fused(images), model(images).detach(), 1e-5)


needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
needs_bf16 = pytest.mark.skipif(not precision.survives("bf16"), reason=f"bf16 {precision.why_not('bf16')}")
FAMILIES = ["deit_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


@needs_kernels
@pytest.mark.parametrize(("name", "options"), NETWORKS, ids=str)
def test_with_products_of_bytes_it_comes_near(name: str, options: dict[str, Any]) -> None:
    model, images = network(name, options), torch.randn(3, 3, 32, 32)
    if options.get("scale") in ("constant", "shortcut_gate", "exclusive_gate"):  # gates of a kind that is not fused
        with pytest.raises(patchloom.PatchloomError, match="changes nothing in the blocks of deit_nano"):
            patchloom.fuse(model, int8=True)
        return
    with torch.no_grad():
        want = model(images)
    fused = patchloom.fuse(model, int8=True)
    assert_close(fused(images), want, 0.15)
    assert torch.equal(fused(images), fused(images))


def test_products_of_bytes_need_the_kernels_and_float32() -> None:
    model = network("deit_nano", {})
    with pytest.raises(patchloom.PatchloomError, match=r"needs the C\+\+ kernels .* kernels=False was asked for"):
        patchloom.fuse(model, kernels=False, int8=True)
    with pytest.raises(patchloom.PatchloomError, match=r"these weights are torch\.float64 on cpu"):
        patchloom.fuse(network("deit_nano", {}).double(), int8=True)
    with pytest.raises(patchloom.PatchloomError, match="fuse the network that it was made from"):
        patchloom.fuse(patchloom.fuse(model), int8=True)


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_number_stays_none(name: str, int8: bool) -> None:
    fused, images = patchloom.fuse(network(name, {}), int8=int8), torch.randn(2, 3, 32, 32)
    images[0, 0, 5, 5] = torch.nan
    logits = fused(images)
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kernels", [True, False])
def test_no_image_has_no_logits(kernels: bool, name: str) -> None:
    assert patchloom.fuse(network(name, {}), kernels=kernels)(torch.empty(0, 3, 32, 32)).shape == (0, 6)


@needs_bf16
@pytest.mark.parametrize("name", FAMILIES)
def test_under_autocast(name: str) -> None:
    model, images = network(name, {}), torch.randn(2, 3, 32, 32)
    fused = patchloom.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fused(images).float(), model(images).float().detach(), 0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_stays_in_its_precision_and_place(name: str) -> None:
    fused = patchloom.fuse(network(name, {}))
    for convert in (fused.double, fused.bfloat16, lambda: fused.to("meta")):
        with pytest.raises(patchloom.PatchloomError, match=r"stays torch\.float32 on cpu"):
            convert()
    fused.to("cpu", torch.float32)
    elsewhere = patchloom.fuse(network(name, {}).to("meta"))
    assert elsewhere(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 6)


@needs_bf16
@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_in_bfloat16_stays_so(name: str) -> None:
    half = patchloom.fuse(network(name, {}).bfloat16())
    assert half(torch.randn(2, 3, 32, 32).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_are_heard_and_keep_what_they_saw(name: str) -> None:
    model, images = network(name, {}), torch.randn(2, 3, 32, 32)
    seen: list[torch.Tensor] = []
    for module in (model.stem, model.stem.proj, *model.blocks):
        module.register_forward_hook(lambda _, __, out: seen.append(out))
    model(images)
    want = [out.detach().clone() for out in seen]
    seen.clear()
    patchloom.fuse(model)(images)
    whole = len(want) - (name == "deit_nano")  # of whose last block only the class token is computed
    for got, wanted in zip(seen[:whole], want[:whole], strict=True):
        assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hook_on_what_writes_over_its_input_is_refused(name: str) -> None:
    """Set on the copy itself, it would keep tensors that the next block has changed."""
    fused, images = patchloom.fuse(network(name, {})), torch.randn(2, 3, 32, 32)
    want = fused(images)
    for module in (fused.stem, fused.blocks[0]):
        with (
            module.register_forward_hook(lambda *_: None),
            pytest.raises(patchloom.PatchloomError, match="set it on the network, then fuse that"),
        ):
            fused(images)
    heard: list[torch.Tensor] = []
    fused.norm.register_forward_hook(lambda *given: heard.append(given[-1]))
    assert torch.equal(fused(images), want)
    assert len(heard) == 1


def test_norms_without_scale_or_shift() -> None:
    model, images = network("deit_nano", {}), torch.randn(2, 3, 32, 32)
    for block, options in zip(model.blocks, ({"bias": False}, {"elementwise_affine": False}), strict=False):
        for residual in (block.mixing, block.ffn):
            residual.branches[0].norm = nn.LayerNorm(model.config.dim, eps=1e-6, **options)
    assert_close(patchloom.fuse(model)(images), model(images).detach(), 1e-5)


def test_a_stem_with_a_way_of_its_own_stays() -> None:
    class Doubled(LinearStem):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(images)

    model, images = network("deit_nano", {}), torch.randn(2, 3, 32, 32)
    model.stem.__class__ = Doubled
    assert_close(patchloom.fuse(model)(images), model(images).detach(), 1e-5)


def test_a_second_fusing_may_choose_again() -> None:
    fused = patchloom.fuse(network("deit_nano", {}))
    assert not patchloom.fuse(fused, class_token_only=False).class_token_only
    with pytest.raises(patchloom.PatchloomError, match="fuse the network that it was made from"):
        patchloom.fuse(fused, kernels=False)
    with pytest.raises(patchloom.PatchloomError, match="fuse the network that it was made from"):
        patchloom.fuse(fused, side_by_side=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stand_in_for_a_part_stays(name: str) -> None:
    class Doubled(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, *given: Any) -> torch.Tensor:
            return 2 * self.part(*given)

    images = torch.randn(2, 3, 32, 32)
    for change in (
        lambda model: setattr(model, "stem", Doubled(model.stem)),
        lambda model: model.blocks.__setitem__(0, Doubled(model.blocks[0])),
        lambda model: setattr(model.blocks[0].mixing.branches[0].fn, "forward", torch.zeros_like),
    ):
        model = network(name, {})
        change(model)
        assert_close(patchloom.fuse(model)(images), model(images).detach(), 1e-5)


def test_images_are_left_as_they_are() -> None:
    fused, images = patchloom.fuse(network("deit_nano", {})), torch.randn(2, 3, 32, 32)
    before = images.clone()
    fused(images)
    assert torch.equal(images, before)


@needs_kernels
def test_the_kernels_are_used_where_they_can_be() -> None:
    for name in ("cait_nano", "deit_nano", "patchconvnet_nano"):
        model = network(name, {})
        assert isinstance(patchloom.fuse(model).blocks[0], FusedColumn)
        for other in (patchloom.fuse(network(name, {}).double()), patchloom.fuse(model, kernels=False)):
            assert len(other.blocks) == len(model.blocks)
            assert not any(getattr(module, "kernels", False) for module in other.modules())
    assert patchloom.fuse(network("resmlp_nano", {})).blocks[0].ffn.branches[0].kernels


@needs_kernels
def test_blocks_in_one_call_and_one_by_one_give_the_same() -> None:
    """A hook anywhere keeps every block as it is, and so does a class token that joins late."""
    for name in ("cait_nano", "deit_nano", "patchconvnet_nano"):
        model, images = network(name, {}), torch.randn(3, 3, 32, 32)
        together = patchloom.fuse(model)(images)
        model.norm.register_forward_hook(lambda *_: None)
        apart = patchloom.fuse(model)
        assert len(apart.blocks) == len(model.blocks)
        assert_close(apart(images), together, 1e-6)
    late = network("deit_nano", {"class_token_at": 1})
    assert not any(isinstance(module, FusedColumn) for module in patchloom.fuse(late).modules())


@needs_kernels
def test_a_copy_for_another_processor_is_refused_where_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, images = patchloom.fuse(network("deit_nano", {}), int8=True), torch.randn(1, 3, 32, 32)
    torch.save(fused, tmp_path / "fused.pt")
    assert torch.equal(torch.load(tmp_path / "fused.pt", weights_only=False)(images), fused(images))
    assert torch.equal(copy.deepcopy(fused)(images), fused(images))
    monkeypatch.setattr("patchloom.models.fused.network.instruction_set", lambda: "another")
    with pytest.raises(patchloom.PatchloomError, match="this processor has another"):
        torch.load(tmp_path / "fused.pt", weights_only=False)


def test_stand_ins_and_hooked_layers_stay_as_they_are() -> None:
    """A quantised or adapted Linear, or one that somebody listens to, is called, not read."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, images, heard = network("deit_nano", {}), torch.randn(2, 3, 32, 32), []
    first, second = model.blocks[0].ffn.branches[0].fn, model.blocks[1].ffn.branches[0].fn
    doubled = Doubled(first.fc2.in_features, first.fc2.out_features)
    doubled.load_state_dict(first.fc2.state_dict())
    first.fc2 = doubled
    second.fc1.register_forward_hook(lambda *_: heard.append(1))
    want = model(images).detach()
    heard.clear()
    fused = patchloom.fuse(model)
    assert_close(fused(images), want, 1e-5)
    assert heard
    assert isinstance(fused.blocks[0].mixing, FusedResidual)


def test_gradients_training_and_capture_are_refused_with_a_sentence() -> None:
    fused = patchloom.fuse(network("deit_nano", {}))
    with pytest.raises(patchloom.PatchloomError, match="inference"):
        fused.train()
    with pytest.raises(patchloom.PatchloomError, match="gradients"):
        fused(torch.randn(1, 3, 32, 32, requires_grad=True))
    with pytest.raises(patchloom.PatchloomError, match="attention maps"), patchloom.capture_attention(fused):
        pass
    with pytest.raises(patchloom.PatchloomError, match="fused"):
        patchloom.save(fused, "never.safetensors")
    assert not fused(torch.randn(1, 3, 32, 32)).requires_grad


def test_it_can_be_fused_again_and_compiled() -> None:
    model, images = network("cait_nano", {}), torch.randn(2, 3, 32, 32)
    fused = patchloom.fuse(patchloom.fuse(model))
    want = model(images).detach()
    assert_close(fused(images), want, 1e-5)
    with torch.no_grad():
        assert_close(torch.compile(fused, backend="aot_eager")(images), want, 1e-5)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize(("dim", "paired"), [(96, False), (128, True), (384, True), (768, True)])
@pytest.mark.parametrize(("name", "options"), [
    ("patchconvnet_nano", {}), ("cait_nano", {"heads": 4}), ("deit3_nano", {"heads": 4}),
])  # fmt: skip
def test_where_seven_products_pay_they_round_little_more_than_eight(
    name: str, options: dict[str, Any], dim: int, paired: bool
) -> None:
    """Also with scales of very different sizes."""
    model = network(name, {"dim": dim, "depth": 6, "patch_size": 2, **options})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gamma"):
                parameter.copy_(10 ** torch.empty_like(parameter).uniform_(-4, 0))
    images = torch.randn(4, 3, 32, 32)
    fused = patchloom.fuse(model)
    assert fused.blocks[0].paired == paired
    assert not patchloom.fuse(model, int8=True).blocks[0].paired
    eight = patchloom.fuse(model, paired=False)
    assert not eight.blocks[0].paired
    with torch.inference_mode():
        want = copy.deepcopy(model).double()(images.double())
        errors = [answer(images) - want for answer in (fused, eight)]
    # beside the same kernels, not torch's products: how those round depends on the processor
    assert errors[0].square().mean().sqrt() < 3 * errors[1].square().mean().sqrt()
    assert errors[0].abs().max() < 5e-6 * want.abs().max()


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize(("name", "options"), [
    ("patchconvnet_nano", {"norm": "layer"}), ("patchconvnet_nano", {"norm": "batch"}), ("cait_nano", {"heads": 4}),
])  # fmt: skip
def test_a_patch_far_larger_than_others_leaves_them_their_rounding(name: str, options: dict[str, Any]) -> None:
    model = network(name, {"dim": 384, "depth": 1, "patch_size": 4, **options}, 64)
    images = torch.randn(1, 3, 64, 64)
    images[:, :, 16:20, 0:4] *= 1e4
    fused = patchloom.fuse(model)
    assert fused.blocks[0].paired == (options.get("norm") != "batch")
    with torch.inference_mode():
        want = copy.deepcopy(model).double().features(images.double()).tokens
        found = [(answer.features(images).tokens - want).norm(dim=-1) / want.norm(dim=-1) for answer in (fused, model)]
    assert float(found[0].max()) < 4 * float(found[1].max()) + 1e-6


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_a_token_with_huge_hidden_activations_costs_its_neighbour_little() -> None:
    """LayerNorm is before an FFN, not inside it: a direction that fc1 makes a thousand times larger is one token's."""
    model = network("cait_nano", {"dim": 384, "heads": 4, "depth": 1, "patch_size": 4}, 64)
    images, fc1, seen = torch.randn(1, 3, 64, 64), model.blocks[0].ffn.branches[0].fn.fc1, []
    with fc1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, 37])):
        model(images)
    with torch.no_grad():
        fc1.weight.add_(1e3 * torch.randn(len(fc1.weight), 1) * seen[0] / seen[0].square().sum())
    with torch.inference_mode():
        want = copy.deepcopy(model).double().features(images.double()).tokens
        found, plain = (
            (patchloom.fuse(model, paired=paired).features(images).tokens - want).norm(dim=-1) / want.norm(dim=-1)
            for paired in (True, False)
        )
    assert float(found.max()) < 1e-4
    assert float(found.median()) < 4 * float(plain.median()) + 1e-6


def test_an_image_that_has_gradients_elsewhere_is_answered_without() -> None:
    model, images = network("deit_nano", {}), torch.randn(1, 3, 32, 32, requires_grad=True)
    with torch.no_grad():
        assert_close(patchloom.fuse(model)(images), model(images), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_images_of_another_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(patchloom.PatchloomError, match="takes normalised images of"):
        patchloom.fuse(network("deit_nano", {}))(torch.zeros(1, 3, 32, 32).to(dtype))


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_a_copy_does_not_change_its_layout() -> None:
    fused = patchloom.fuse(network("deit_nano", {}), int8=True)
    with pytest.raises(patchloom.PatchloomError, match="fused copy stays"):
        fused.to(memory_format=torch.channels_last)
