"""What every network promises: outputs, layouts, heads, roles, gradients, precision, clear errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import patchloom
from conftest import assert_close, relative_difference, stir
from patchloom import PatchloomError
from patchloom.models.registry import build, find_config
from patchloom.models.roles import ROLES

NANOS = ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


def shrunk(name: str, **options):
    """The listed model with its own choices, but narrow, shallow and for small images."""
    config = find_config(name)
    if config.architecture == "convnet":
        return build(config.replace(num_classes=5, img_size=(64, 64)))
    stem_patch = 8 if getattr(config, "stem", "linear") != "linear" else config.patch_size // 2 or 1
    side = stem_patch * 4
    dim = 8 * getattr(config, "heads", 3)
    return build(
        config.replace(num_classes=5, img_size=(side, side), patch_size=stem_patch, dim=dim, depth=2, **options)
    )


def images(model, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, model.config.in_chans, *model.config.img_size)


@pytest.mark.parametrize("name", patchloom.list_models(kind="image"))
def test_every_parameter_of_every_model_gets_a_gradient_and_a_role(name: str) -> None:
    model = stir(shrunk(name), 0.3).eval()
    x = images(model)
    before = model(x)
    (before * torch.randn(3, 5)).sum().backward()
    roles = patchloom.parameter_roles(model)
    assert set(roles) == {key for key, _ in model.named_parameters()}
    assert set(roles.values()) <= set(ROLES)
    assert {"stem", "head"} <= set(roles.values())
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-10:
            continue
        # shifts that softmax cancels: the bias of the keys, and of the first talking-heads mixing
        assert key.endswith(("fn.k.bias", "fn.proj_l.bias")), f"no gradient for {key}"
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))
            assert_close(model(x), before.detach(), 1e-4, key)


def test_roles_are_those_that_fine_tuning_needs() -> None:
    roles = patchloom.parameter_roles(patchloom.create_model("cait_nano", distilled=True))
    assert roles["positions"] == "position"
    assert roles["class_token"] == roles["distill_token"] == "token"
    assert roles["pool.0.mixing.branches.0.fn.k.weight"] == "attention"
    assert roles["blocks.0.mixing.branches.0.fn.proj_l.weight"] == "attention"
    assert roles["head_distill.bias"] == "head"
    roles = patchloom.parameter_roles(patchloom.create_model("vit_tiny_2x2", stem="hmlp", scale="layerscale"))
    assert roles["blocks.1.mixing.branches.1.fn.qkv.weight"] == "attention"
    assert roles["blocks.1.ffn.branches.1.scale.gamma"] == "scale"
    assert {role for key, role in roles.items() if key.startswith("stem.")} == {"stem"}
    roles = patchloom.parameter_roles(patchloom.create_model("patchconvnet_nano", norm="batch"))
    assert roles["pool.0.mixing.branches.0.fn.q.weight"] == "pool"
    assert roles["blocks.0.mixing.branches.0.fn.squeeze_excite.conv_reduce.weight"] == "mixing"
    assert roles["blocks.0.mixing.branches.0.norm.weight"] == "norm"


@pytest.mark.parametrize("name", [*NANOS, "deit_tiny_distilled"])
def test_features_embedding_and_logits_belong_together(name: str) -> None:
    options = {"img_size": (32, 48), "patch_size": 8, "num_classes": 6}
    model = stir(patchloom.create_model(name, **options)).eval()
    x = images(model)
    features = model.features(x)
    assert features.layout == model.token_layout
    assert features.layout[1:] == (4, 6)
    assert features.grid.shape == (3, model.config.dim, 4, 6)
    assert features.prefix.shape[1] + features.patches.shape[1] == features.tokens.shape[1]
    assert torch.equal(features.grid[:, :, 1, 2], features.patches[:, 1 * 6 + 2])
    read = features.prefix if features.layout.prefix else features.patches.mean(dim=1, keepdim=True)
    assert_close(model.embed(x), read.mean(dim=1), 1e-5)
    assert_close(model(x), model.classify(read), 1e-5)


def test_capture_keeps_the_logits_and_leaves_nothing_behind() -> None:
    for name in ("deit_nano", "cait_nano", "patchconvnet_nano"):
        model = stir(patchloom.create_model(name, num_classes=6)).eval()
        x = images(model)
        with torch.no_grad():
            plain = model(x)
            with patchloom.capture_attention(model) as maps:
                assert_close(model(x), plain, 1e-5)
            assert maps
            for attention in maps.values():
                assert_close(attention.sum(dim=-1), torch.ones_like(attention[..., 0]), 1e-5)
            count = len(maps)
            model(x)
            assert len(maps) == count
    with pytest.raises(ZeroDivisionError), patchloom.capture_attention(model):
        raise ZeroDivisionError
    assert not any(getattr(module, "recorders", ()) for module in model.modules())


def test_captures_can_be_nested() -> None:
    model = patchloom.create_model("cait_nano", num_classes=6).eval()
    with patchloom.capture_attention(model) as outer:
        with patchloom.capture_attention(model.pool) as inner:
            model(images(model))
        assert len(inner) == 2
        assert len(outer) == 8
        outer.clear()
        model(images(model))
        assert len(outer) == 8
        assert len(inner) == 2


def test_captures_can_end_in_any_order() -> None:
    model = patchloom.create_model("deit_nano", num_classes=6).eval()
    first, second = patchloom.capture_attention(model), patchloom.capture_attention(model)
    first.__enter__()
    maps = second.__enter__()
    first.__exit__(None, None, None)
    model(images(model))
    assert len(maps) == 6
    second.__exit__(None, None, None)
    assert not any(getattr(module, "recorders", ()) for module in model.modules())


def test_maps_can_be_captured_while_checkpointing() -> None:
    model = patchloom.create_model("cait_nano", num_classes=6, drop_path=0.1).train()
    model.gradient_checkpointing = True
    with patchloom.capture_attention(model) as maps:
        out = model(images(model))
    (out.sum() + sum(attention.square().sum() for attention in maps.values())).backward()
    assert len(maps) == 8
    assert model.blocks[0].mixing.branches[0].fn.qkv.weight.grad is not None


def test_capture_of_the_last_block_covers_all_queries() -> None:
    model = patchloom.create_model("deit_nano", num_classes=6).eval()
    with patchloom.capture_attention(model) as maps:
        model(images(model))
    tokens = 1 + model.config.patches
    assert {tuple(attention.shape) for attention in maps.values()} == {(3, 3, tokens, tokens)}


@pytest.mark.parametrize("name", ["deit_nano", "cait_nano", "patchconvnet_nano"])
def test_distillation_and_class_queries_survive_a_new_head(name: str) -> None:
    options = {"queries": "per_class"} if name.startswith("patch") else {"distilled": True}
    model = patchloom.create_model(name, num_classes=6, **options)
    model.class_names = tuple("abcdef")
    model.reset_head(4)
    out = model(images(model))
    pair = out if isinstance(out, tuple) else (out, out)
    assert [logits.shape for logits in pair] == [(3, 4), (3, 4)]
    assert model.config.num_classes == 4
    assert model.class_names is None
    assert 0.01 < float(model.head.weight.detach().std()) < 0.03
    assert patchloom.complexity(model).params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", NANOS)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    model = stir(patchloom.create_model(name, num_classes=5, drop_path=0.2)).train()
    x, results = images(model), []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        calls = []
        handle = model.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        out = model(x)
        out.sum().backward()
        handle.remove()
        assert len(calls) == 1 + model.gradient_checkpointing  # the backward pass computes the block anew
        results.append((out.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for key, gradient in results[0][1].items():
        if gradient.any():  # not so the biases that softmax cancels
            assert_close(results[1][1][key], gradient, 1e-5, key)


@pytest.mark.parametrize("name", NANOS)
def test_stochastic_depth_acts_in_training_only(name: str) -> None:
    model = stir(patchloom.create_model(name, num_classes=5, drop_path=0.5))
    x = images(model)
    assert relative_difference(model.train()(x), model(x)) > 1e-3
    assert torch.equal(model.eval()(x), model(x))


def test_drop_path_rises_linearly_in_deit_only() -> None:
    rates = {
        name: [block.ffn.branches[0].drop_path.rate for block in patchloom.create_model(name, drop_path=0.1).blocks]
        for name in ("deit_nano", "deit3_nano", "cait_nano", "resmlp_nano")
    }
    assert rates["deit_nano"] == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1])
    for name in ("deit3_nano", "cait_nano", "resmlp_nano"):
        assert set(rates[name]) == {0.1}
    cait = patchloom.create_model("cait_nano", drop_path=0.1)
    assert {block.ffn.branches[0].drop_path.rate for block in cait.pool} == {0.0}


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize(("patch", "size"), [(16, 64), (8, 32), (4, 16), (2, 8)])
def test_hmlp_keeps_patches_apart(norm: str, patch: int, size: int) -> None:
    options = {"stem": "hmlp", "stem_norm": norm, "patch_size": patch, "img_size": size, "num_classes": 2}
    stem = stir(patchloom.create_model("vit_tiny_1x1", **options)).eval().stem
    if norm == "layer":
        stem.train()  # LayerNorm keeps them apart in training too
    x = torch.randn(2, 3, size, size)
    y = x.clone()
    y[:, :, patch : 2 * patch, 2 * patch : 3 * patch] += 1
    changed = (stem(x) - stem(y)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [1 * 4 + 2]


def test_the_conv_stem_does_not_keep_them_apart() -> None:
    stem = stir(patchloom.create_model("vit_tiny_1x1", stem="conv", img_size=64, num_classes=2)).eval().stem
    x = torch.randn(2, 3, 64, 64)
    y = x.clone()
    y[:, :, 16:32, 32:48] += 1
    assert int(((stem(x) - stem(y)).abs().amax(dim=(0, 2)) > 1e-6).sum()) > 1


def test_every_family_takes_any_size_but_resmlp_which_names_both() -> None:
    model = patchloom.create_model("patchconvnet_nano", num_classes=3)
    assert model(torch.randn(1, 3, 40, 64)).shape == (1, 3)
    assert model.features(torch.randn(1, 3, 40, 64)).layout == (1, 10, 16)
    for name in ("deit_nano", "deit3_nano", "cait_nano"):
        assert patchloom.create_model(name, num_classes=3)(torch.randn(1, 3, 40, 64)).shape == (1, 3)
    with pytest.raises(PatchloomError, match=r"32 x 32, not 40 x 32.*img_size=\(40, 32\)"):
        patchloom.create_model("resmlp_nano")(torch.randn(1, 3, 40, 32))


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 1, 32, 32), "channels"), ((3, 32, 32), "batch"), ((1, 3, 42, 32), "42 x 32 is not; 40 x 32 would be")],
)
def test_wrong_images_are_refused(shape: tuple[int, ...], words: str) -> None:
    for name in NANOS:
        with pytest.raises(PatchloomError, match=words):
            patchloom.create_model(name)(torch.randn(shape))


def test_integer_images_are_refused() -> None:
    with pytest.raises(PatchloomError, match="uint8"):
        patchloom.create_model("deit_nano")(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_the_class_token_can_join_late() -> None:
    """Before it joins, blocks work on patches alone (CaiT Table 3.13)."""
    model = stir(patchloom.create_model("deit_nano", num_classes=3, class_token_at=4)).eval()
    with patchloom.capture_attention(model) as maps:
        model(images(model))
    tokens = [attention.shape[-1] for attention in maps.values()]
    assert tokens == [64, 64, 64, 64, 65, 65]


def test_frozen_scales_of_another_checkpoint(tmp_path) -> None:
    """CaiT 3.5.3: train anew with the learned scales of another network, kept fixed."""
    from patchloom.weights.load import copy_scales

    teacher = stir(patchloom.create_model("deit3_nano", num_classes=3))
    patchloom.save(teacher, tmp_path / "learned.safetensors")
    model = patchloom.create_model("deit3_nano", num_classes=7, scale_trainable=False)
    copied = copy_scales(model, tmp_path / "learned.safetensors")
    assert len(copied) == 12
    for key, parameter in model.named_parameters():
        is_scale = key.endswith("scale.gamma")
        assert parameter.requires_grad != is_scale
        if is_scale:
            assert torch.equal(parameter, teacher.get_parameter(key))
    with pytest.raises(PatchloomError, match="scale"):
        copy_scales(patchloom.create_model("deit_nano"), tmp_path / "learned.safetensors")


@pytest.mark.parametrize(
    "name", ["cait_nano", *[pytest.param(name, marks=pytest.mark.slow) for name in NANOS if name != "cait_nano"]]
)
def test_compiled_networks_agree(name: str) -> None:
    model = stir(patchloom.create_model(name, num_classes=5, depth=2)).eval()
    x = images(model)
    with torch.no_grad():
        want = model(x)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, fullgraph=True)
        assert_close(compiled(x), want, 1e-5, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


BF16 = """
import torch, patchloom
torch.manual_seed(0)
for name in ("deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"):
    model = patchloom.create_model(name, num_classes=5).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    x = torch.randn(4, 3, 32, 32)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            want = model(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = model(x)
        worst = float(((got.float() - want).abs().max() / want.abs().max()).detach())
        assert worst < 0.05, f"{name}: {worst}"
        assert got.dtype == torch.bfloat16
print("fine")
"""


def test_bf16_autocast_agrees_to_its_precision() -> None:
    """In a child process, because bf16 kills the process on machines whose AMX is advertised but broken."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", BF16], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
