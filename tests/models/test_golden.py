"""Every network equals the authors' code: outputs, intermediates, attention maps, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import patchloom
from conftest import GOLDEN_HINTS, SHARED, Golden
from patchloom.layers.mixing import SqueezeExcite
from patchloom.weights.layouts import from_ours

SETS = [(name, "strong") for name in GOLDEN_HINTS] + [
    pytest.param(
        name, "plain", marks=pytest.mark.skipif(not SHARED.is_dir(), reason=f"no plain weight set at {SHARED}")
    )
    for name in GOLDEN_HINTS
]


def recorded(name: str, kind: str) -> Golden:
    return Golden(name, kind) if kind == "strong" else Golden(name, kind, SHARED / "golden" / "models")


def outputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the parts of a network put out in one `features` call, under the names of the recordings."""
    out: dict[str, Tensor] = {}

    def keep(key: str):
        return lambda module, inputs, output: out.__setitem__(key, output)

    hooks = [model.stem.register_forward_hook(keep("patch_embed"))]
    for i, block in enumerate(model.blocks):
        hooks.append(block.register_forward_hook(keep(f"block.{i}")))
    for i, block in enumerate(model.pool):
        hooks.append(block.register_forward_hook(keep(f"cls_block.{i}")))
    hooks.append(model.blocks[0].register_forward_pre_hook(lambda module, inputs: out.__setitem__("embed", inputs[0])))
    out["norm"] = model.features(x).tokens
    for hook in hooks:
        hook.remove()
    return {key: value.flatten(1, 2) if value.ndim == 4 else value for key, value in out.items()}


@pytest.mark.parametrize(("name", "kind"), SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_and_intermediates(name: str, kind: str, dtype: torch.dtype) -> None:
    golden = recorded(name, kind)
    model = golden.model(dtype)
    x = golden["x"].to(dtype)
    golden.check("logits", model(x))
    with torch.no_grad():
        golden.check("logits", model(x))
    found = outputs_of(model, x)
    assert {
        key for key in golden.tensors if key.split(".")[0] in ("patch_embed", "embed", "block", "cls_block", "norm")
    } == set(found)
    for key, value in found.items():
        golden.check(key, value)


@pytest.mark.parametrize(("name", "kind"), SETS)
def test_attention_maps(name: str, kind: str) -> None:
    golden = recorded(name, kind)
    model = golden.model()
    with patchloom.capture_attention(model) as maps:
        golden.check("logits", model(golden["x"]))
    names = {
        "attn": "blocks.{}.mixing.branches.0.fn",
        "attn1": "blocks.{}.mixing.branches.1.fn",
        "cls_attn": "pool.{}.mixing.branches.0.fn",
    }
    keys = [key for key in golden.tensors if key.split(".")[0] in names]
    assert len(keys) >= 1 or name == "resmlp"
    for key in keys:
        kind_of_map, layer = key.split(".")
        golden.check(key, maps[names[kind_of_map].format(layer)])


@pytest.mark.parametrize("name", ["cait", "cait_rect"])
def test_talking_heads_before_and_after_mixing(name: str) -> None:
    golden = Golden(name)
    model = golden.model()
    layer = model.blocks[0].mixing.branches[0]
    seen: dict[str, Tensor] = {}
    layer.fn.proj_l.register_forward_hook(lambda module, inputs, output: seen.__setitem__("attn_premix.0", inputs[0]))
    layer.fn.proj_w.register_forward_hook(lambda module, inputs, output: seen.__setitem__("attn_mixed.0", output))
    with patchloom.capture_attention(model):
        model(golden["x"])
    for key, value in seen.items():
        golden.check(key, value.permute(0, 3, 1, 2))
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["patchconvnet", "patchconvnet_multi"])
def test_squeeze_excite_gate(name: str) -> None:
    golden = Golden(name)
    model = golden.model()
    layer = next(module for module in model.modules() if isinstance(module, SqueezeExcite))
    gates: list[Tensor] = []
    layer.register_forward_hook(lambda module, inputs, output: gates.append(module.gate(inputs[0])))
    model(golden["x"])
    golden.check("se_gate.0", gates[0].permute(0, 3, 1, 2))


@pytest.mark.parametrize(("name", "kind"), SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients(name: str, kind: str, dtype: torch.dtype) -> None:
    golden = recorded(name, kind)
    model = golden.model(dtype)
    x = golden["x"].to(dtype).requires_grad_()
    (model(x) * golden["g"].to(dtype)).sum().backward()
    golden.check("grad.x", x.grad)
    ours = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    official = from_ours(ours, model.config, "official")
    for key in golden.tensors:
        if key.startswith("grad.") and key != "grad.x":
            golden.check(key, official[key[5:]])


def test_distilled_network_gives_a_pair_in_training() -> None:
    golden = Golden("deit_distilled")
    model = golden.model().train()
    x = golden["x"].requires_grad_()
    classes, distilled = model(x)
    golden.check("logits_cls", classes)
    golden.check("logits_dist", distilled)
    ((classes * golden["g"]).sum() + (distilled * golden["g_dist"]).sum()).backward()
    golden.check("grad_two.x", x.grad)
    golden.check("grad_two.dist_token", model.distill_token.grad)
    golden.check("grad_two.pos_embed", model.positions.grad)


def test_hmlp_stem_in_training_uses_and_updates_batch_statistics() -> None:
    golden = Golden("vit_hmlp")
    model = golden.model().train()
    golden.check("train.logits", model(golden["x"]))
    after = from_ours(model.state_dict(), model.config, "official")
    keys = [key for key in golden.tensors if key.startswith("train.patch_embed")]
    assert len(keys) == 6
    for key in keys:
        golden.check(key, after[key[6:]])
