"""Each fast form equals its plain form, in outputs and in every gradient, at odd sizes and in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import assert_close, stir
from patchloom.layers.attention import ClassAttention, SelfAttention, TalkingHeadsAttention
from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import gelu
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear, GridConv
from patchloom.layers.scales import FixupScale, LayerScale, ScalarScale
from patchloom.layers.stems import ConvStem, HMLPStem, LinearStem

Form = Callable[[Tensor], Tensor]


def attention_plain(layer: nn.Module, queries: int | None = None) -> Form:
    def plain(x: Tensor) -> Tensor:
        layer.recorders = (lambda weights: None,)
        try:
            return layer(x) if queries is None else layer(x, queries)
        finally:
            layer.recorders = ()

    return plain


def cases() -> dict[str, tuple[nn.Module, Tensor, Form, Form]]:
    """name -> (layer, input, fast form, plain form)."""
    tokens, grid = torch.randn(3, 21, 24), torch.randn(3, 5, 3, 24)
    attention, talking, pooling = SelfAttention(24, 3), TalkingHeadsAttention(24, 4), ClassAttention(24, 2)
    multi = ClassAttention(24, 2, in_keys=False)
    cross, branch, stem = CrossPatchLinear(21), ConvBranch(24), LinearStem(3, 24, 4)
    conv = GridConv(24, (7, 3), "separable")
    images = torch.randn(2, 3, 16, 24)
    hmlp, stem_conv = HMLPStem(3, 24, 8).eval(), ConvStem(3, 24, 8, "layer")

    def conv_plain(x: Tensor) -> Tensor:
        maps = conv.conv(x.transpose(1, 2).unflatten(2, (7, 3)).contiguous())
        maps = F.conv2d(maps, conv.pointwise.weight, conv.pointwise.bias)
        return maps.flatten(2).transpose(1, 2)

    ffn = FFN(24, 50)
    return {
        "self-attention": (attention, tokens, attention, attention_plain(attention)),
        "self-attention, few queries": (
            attention,
            tokens,
            lambda x: attention(x, 2),
            lambda x: attention_plain(attention)(x)[:, :2],
        ),
        "talking heads": (talking, tokens, talking, attention_plain(talking)),
        "class-attention": (pooling, tokens, lambda x: pooling(x, 2), attention_plain(pooling, 2)),
        "class-attention of patches": (multi, tokens, lambda x: multi(x, 2), attention_plain(multi, 2)),
        "class-attention of patches, many queries": (multi, tokens, lambda x: multi(x, 5), attention_plain(multi, 5)),
        "cross-patch": (cross, tokens, cross, cross.plain),
        "conv branch": (branch, grid, branch, branch.plain),
        "grid conv": (conv, tokens, conv, conv_plain),
        "linear stem": (stem, images, stem, stem.plain),
        "hMLP stem": (hmlp, images, hmlp, hmlp.plain),
        "conv stem": (stem_conv, images, stem_conv, stem_conv.plain),
        "ffn": (ffn, tokens, ffn, lambda x: ffn.fc2(F.gelu(ffn.fc1(x)))),
    }


NAMES = list(cases())


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_equal_the_plain_form(name: str) -> None:
    layer, x, fast, plain = cases()[name]
    stir(layer.double())
    results = []
    for form in (fast, plain):
        layer.zero_grad()
        leaf = x.double().requires_grad_()
        out = form(leaf)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.double).view_as(out)).sum().backward()
        gradients = {key: p.grad for key, p in layer.named_parameters()}
        results.append({"output": out.detach(), "input": leaf.grad, **gradients})
    for key, want in results[1].items():
        got = results[0][key]
        if (
            got is None or float(want.abs().max()) < 1e-12
        ):  # softmax cancels these biases: left out, or zero to rounding
            assert key in ("proj_l.bias", "k.bias"), key
            assert float(want.abs().max()) < 1e-12
        else:
            assert_close(got, want, 1e-12, f"{name} {key}")


class Operators(TorchDispatchMode):
    """The names of torch's operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ffn", "grid conv")])
def test_the_plain_form_can_be_asked_for(name: str) -> None:
    layer, x, call, _ = cases()[name]
    called, results = [], []
    for layer.fast in (True, False):
        with Operators() as operators:
            results.append(call(x))
        called.append(operators.called)
    assert_close(results[0], results[1], 2e-6)
    assert called[0] != called[1]


@pytest.mark.parametrize("name", NAMES)
def test_inference_equals_the_plain_form(name: str) -> None:
    """Without gradients other paths are taken: in place, image by image."""
    layer, x, fast, plain = cases()[name]
    stir(layer)
    kept = x.clone()
    want = plain(x).detach()
    with torch.no_grad():
        assert_close(fast(x), want, 2e-6, name)
    with torch.inference_mode():
        assert_close(fast(x), want, 2e-6, name)
    assert torch.equal(x, kept), "the input was written to"


@pytest.mark.parametrize("scale", [LayerScale(24, 0.3, "uniform"), ScalarScale(0.7), FixupScale(0.4)])
def test_scaled_addition_in_one_pass(scale: nn.Module) -> None:
    total, y = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    assert_close(scale(total, y), total + scale.of(y), 1e-6)


def test_gelu_is_in_place_only_where_nobody_sees_it() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        x = layer(torch.randn(3, 4))
        want = F.gelu(x)
        assert gelu(x, layer).data_ptr() == x.data_ptr()
        assert_close(x, want, 1e-6)
        layer.register_forward_hook(lambda *_: None)
        assert gelu(x, layer).data_ptr() != x.data_ptr()
    x = nn.Linear(4, 4)(torch.randn(3, 4))
    assert gelu(x, nn.Linear(4, 4)).data_ptr() != x.data_ptr()


def test_what_a_stand_in_gives_out_is_left_as_it_is() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    ffn, x = FFN(8, 16), torch.randn(2, 3, 8)
    ffn.fc1 = Keeping(8, 16)
    with torch.no_grad():
        ffn(x)
        assert torch.equal(ffn.fc1.kept, F.linear(x, ffn.fc1.weight, ffn.fc1.bias))


def test_forward_mode_gradients_of_talking_heads() -> None:
    layer, x, way = stir(TalkingHeadsAttention(24, 4)), torch.randn(1, 5, 24), torch.randn(1, 5, 24)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, way))).tangent
    wide, step = layer.double(), 1e-5 * way.double()
    assert_close(got, (wide(x.double() + step) - wide(x.double() - step)).detach().float() / 2e-5, 1e-4)


def test_global_hooks_count_too() -> None:
    layer = nn.Linear(4, 4)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with torch.no_grad():
            x = layer(torch.randn(3, 4))
            assert gelu(x, layer).data_ptr() != x.data_ptr()
    finally:
        handle.remove()


def test_hooks_under_no_grad_see_what_a_layer_put_out() -> None:
    ffn = stir(FFN(8, 16))
    x = torch.randn(2, 3, 8)
    want = ffn.fc1(x).detach()
    seen = []
    ffn.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        ffn(x)
    assert torch.equal(seen[0], want)
