"""The proofs can fail: each deliberate mistake, put into a network, must break the comparison with the recordings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import Golden
from patchloom.layers import mixing
from patchloom.layers.ffn import FFN
from patchloom.layers.residual import Branch
from patchloom.layers.scales import LayerScale, Scale

Mistake = Callable[[nn.Module], None]


def swap(a: nn.Module, b: nn.Module, part: str) -> None:
    first, second = getattr(a, part), getattr(b, part)
    setattr(a, part, second)
    setattr(b, part, first)


def norms_swapped(model: nn.Module) -> None:
    swap(model.blocks[0].mixing.branches[0], model.blocks[0].ffn.branches[0], "norm")


def scales_swapped(model: nn.Module) -> None:
    swap(model.blocks[0].mixing.branches[0], model.blocks[0].ffn.branches[0], "scale")


def layerscale_dropped(model: nn.Module) -> None:
    last = [m for m in model.modules() if isinstance(m, Branch) and isinstance(m.scale, LayerScale)][-1]
    last.scale = Scale()


def head_mix_transposed(before: bool) -> Mistake:
    def mistake(model: nn.Module) -> None:
        attention = model.blocks[0].mixing.branches[0].fn
        weight = (attention.proj_l if before else attention.proj_w).weight
        weight.data = weight.data.T.contiguous()

    return mistake


def head_mix_bias_dropped(model: nn.Module) -> None:
    model.blocks[0].mixing.branches[0].fn.proj_w.bias.data.zero_()


def cross_patch_transposed(model: nn.Module) -> None:
    weight = model.blocks[0].mixing.branches[0].fn.weight
    weight.data = weight.data.T.contiguous()


def tanh_gelu(model: nn.Module) -> None:
    """In the last FFN alone: the weakest mistake of all."""
    last = [m for m in model.modules() if isinstance(m, FFN)][-1]
    last.forward = lambda x: last.fc2(F.gelu(last.fc1(x), approximate="tanh"))


def tanh_gelu_in_the_trunk(model: nn.Module) -> None:
    """In the last convolutional branch alone, after its depth-wise convolution."""
    last = model.blocks[-1].mixing.branches[0].fn

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(last.expand(x))
        return last.project(last.squeeze_excite(F.gelu(mixing.convolve(last.depthwise, x), approximate="tanh")))

    last.forward = forward


def wrong_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def wrong_epsilon_at_the_end(model: nn.Module) -> None:
    model.norm.eps = 1e-5


def final_norm_dropped(model: nn.Module) -> None:
    model.norm = nn.Identity()


def positions_added_to_the_class_token(model: nn.Module) -> None:
    model.class_token.data += model.positions.data[:, :1]


def no_position_on_the_class_token(model: nn.Module) -> None:
    model.positions.data[:, 0] = 0


def tokens_swapped(model: nn.Module) -> None:
    model.class_token, model.distill_token = model.distill_token, model.class_token


def queries_and_keys_swapped(model: nn.Module) -> None:
    weight = model.blocks[0].mixing.branches[0].fn.qkv.weight
    q, k, v = weight.data.chunk(3)
    weight.data = torch.cat([k, q, v])


def attention_scale_forgotten(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend_fast = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0)


def second_branch_dropped(model: nn.Module) -> None:
    del model.blocks[0].mixing.branches[1]


def branches_in_sequence(model: nn.Module) -> None:
    residual = model.blocks[0].mixing
    first, second = residual.branches

    def forward(x: torch.Tensor, queries: int | None = None) -> torch.Tensor:
        y = first(x, x)
        return second(y, y)

    residual.forward = forward


def class_token_left_out_of_the_keys(model: nn.Module) -> None:
    model.pool[0].mixing.branches[0].fn.in_keys = False


def class_token_among_the_keys(model: nn.Module) -> None:
    model.pool[0].mixing.branches[0].fn.in_keys = True


def squeeze_excite_dropped(model: nn.Module) -> None:
    model.blocks[0].mixing.branches[0].fn.squeeze_excite = nn.Identity()


def rows_and_columns_swapped(model: nn.Module) -> None:
    branch = model.blocks[0].mixing.branches[0].fn
    branch.forward = lambda x: mixing.ConvBranch.forward(branch, x.transpose(1, 2)).transpose(1, 2)


CASES: list[tuple[str, Mistake]] = [
    *[(name, norms_swapped) for name in ("deit", "deit3", "cait", "resmlp", "vit_parallel", "vit_hmlp")],
    *[(name, scales_swapped) for name in ("deit3", "cait", "resmlp", "vit_parallel_ls")],
    *[
        (name, layerscale_dropped)
        for name in ("deit3", "cait", "cait_rect", "resmlp", "patchconvnet", "vit_parallel_ls")
    ],
    *[(name, tanh_gelu) for name in ("deit", "deit3", "cait", "resmlp", "patchconvnet", "vit_parallel", "vit_hmlp")],
    *[(name, wrong_epsilon) for name in ("deit", "deit3", "cait", "patchconvnet", "vit_parallel", "vit_hmlp")],
    *[(name, wrong_epsilon_at_the_end) for name in ("deit", "deit3", "cait", "patchconvnet")],
    *[(name, final_norm_dropped) for name in ("deit", "cait", "resmlp", "patchconvnet")],
    *[(name, positions_added_to_the_class_token) for name in ("deit3", "vit_parallel", "vit_hmlp")],
    *[(name, queries_and_keys_swapped) for name in ("deit", "deit3", "cait", "cait_rect")],
    *[(name, class_token_left_out_of_the_keys) for name in ("cait", "cait_rect", "patchconvnet")],
    *[(name, second_branch_dropped) for name in ("vit_parallel", "vit_parallel_ls")],
    *[(name, branches_in_sequence) for name in ("vit_parallel", "vit_parallel_ls")],
    ("deit", no_position_on_the_class_token),
    ("deit", attention_scale_forgotten),
    ("deit_distilled", tokens_swapped),
    ("cait", head_mix_transposed(before=True)),
    ("cait", head_mix_transposed(before=False)),
    ("cait_rect", head_mix_transposed(before=True)),
    ("cait", head_mix_bias_dropped),
    ("resmlp", cross_patch_transposed),
    ("patchconvnet_multi", class_token_among_the_keys),
    ("patchconvnet", squeeze_excite_dropped),
    ("patchconvnet", rows_and_columns_swapped),
    ("patchconvnet", tanh_gelu_in_the_trunk),
]


@pytest.mark.parametrize(
    ("name", "mistake"), CASES, ids=[f"{name}-{m.__qualname__.split('.')[0]}" for name, m in CASES]
)
def test_mistake_is_noticed(name: str, mistake: Mistake) -> None:
    golden = Golden(name)
    model = golden.model(torch.float32)
    golden.check("logits", model(golden["x"].float()))
    mistake(model)
    with pytest.raises(AssertionError, match="relative difference"):
        golden.check("logits", model(golden["x"].float()))
