"""A copy of a network for inference: norms and scales folded into the weights beside them, residuals in place.

Exact to float rounding, unless its products are of bytes. Each residual branch becomes one that adds to the tokens
where they are; a branch of a kind that is not known here stays as it is. Shapes: x is (B, N, D) tokens or
(B, height, width, D) maps.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.kernels import libraries, native
from patchloom.layers.attention import (
    Attention,
    ClassAttention,
    SelfAttention,
    TalkingHeadsAttention,
    attend_without_keys,
    few_queries,
    talking_heads_by_image,
)
from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import IN_PLACE, hooked, replaceable
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear, Pointwise, SqueezeExcite, convolve
from patchloom.layers.norms import Affine, BatchNorm
from patchloom.layers.residual import Block, Branch, DropPath, Residual
from patchloom.layers.scales import AffineScale, FixupScale, LayerScale, ScalarScale, Scale
from patchloom.layers.stems import ConvStem, HMLPStem, LinearStem, LinearThenStem, Stem
from patchloom.models.folding import (
    FoldedLinear,
    Form,
    batch_norm_parts,
    fold_input,
    fold_output,
    matrix_of,
    norm_parts,
    scale_parts,
    stack_inputs,
    stack_outputs,
)
from patchloom.models.network import Network, unwrapped


def fuse(
    model: nn.Module,
    class_token_only: bool = True,
    kernels: bool = True,
    int8: bool = False,
    paired: bool = True,
    side_by_side: bool = True,
) -> Network:
    """A copy of `model` for inference: faster, the same logits to float rounding; `model` stays as it is.

    Args:
        class_token_only: The last block computes only what the logits need; `features` always gives every token.
        kernels: Use the C++ kernels where they can be used: float32 on a CPU that has the instructions.
        int8: Use int8 matrix multiplication, with the kernels: faster, slightly less accurate.
        paired: Use one Strassen step where that is faster: tokens in pairs share their rounding.
        side_by_side: Compute parallel branches of the same shape as one wider branch, not one after another.
    """
    network = copy.deepcopy(unwrapped(model)).eval().requires_grad_(False)
    if not next(network.parameters()).is_cpu and not int8:  # the faster forms are for the CPU
        network.class_token_only = class_token_only
        return network
    if network.fused:
        if int8 or not (kernels and paired and side_by_side):
            raise PatchloomError("This is a fused copy already: fuse the network that it was made from.")
        network.class_token_only = class_token_only
        return network
    form = _form(next(network.parameters()), kernels, int8)._replace(side_by_side=side_by_side)
    network.class_token_only = class_token_only
    network.fused = True
    in_place = network.writes_over = not any(hooked(m) for m in network.modules())  # a hook may keep what it is shown
    asked = (*network.pool, *(network.blocks[-1:] if network.join_at is not None else ()))
    for block in (block for stage in (network.blocks, network.pool) for block in stage if isinstance(block, Block)):
        few = form._replace(few=block in asked)
        for name, residual in block.named_children():
            setattr(block, name, fuse_residual(residual, few, in_place))
    if int8 and not any(isinstance(module, FusedAttention | FusedFFN | FusedConv) for module in network.modules()):
        raise PatchloomError(f"int8=True changes nothing in the blocks of {network.config.name}: they cannot be fused.")
    if form.kernels and in_place:
        network.blocks = in_columns(network, int8, paired)
    if form.kernels and (stages := stages_of(network.stem)):
        network.stem = FusedStem(stages, form)
    network.instructions = libraries.instruction_set() if form.kernels else None
    return network


def _form(parameter: Tensor, kernels: bool, int8: bool) -> Form:
    """What can be had of what was asked for."""
    here = parameter.is_cpu and parameter.dtype == torch.float32
    if int8 and not (kernels and here and native.available()):
        found = f"these weights are {parameter.dtype} on {parameter.device}." if not here else native.why_not()
        why = found if kernels else "kernels=False was asked for."
        raise PatchloomError(f"int8=True needs the C++ kernels and float32 weights on a CPU: {why}")
    return Form(kernels and here and native.available(), int8)


class FusedResidual(nn.Module):
    """x + the sum of its branches, in place where it may be; parallel branches all read the x that came in."""

    def __init__(self, branches: list[nn.Module], in_place: bool = True) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.in_place = in_place and len(branches) == 1

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        total = x = _for_inference(x)
        if queries is not None or not self.in_place:
            total = x[:, :queries].clone()
        for branch in self.branches:
            total = branch(total, x, queries)
        return total


class PostNorm(nn.Module):
    """norm(residual(x)); it has no `branches`, so that no column is made of its block."""

    def __init__(self, residual: FusedResidual, norm: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.norm = norm

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        return self.norm(self.residual(x, queries))


def _for_inference(x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise PatchloomError("A fused copy is for inference: take gradients of the network that it was made from.")
    return x.detach().contiguous()


class FusedAttention(nn.Module):
    """total += scale(attention(norm(x))), for self-attention, talking heads and class-attention.

    `beside`: parallel branches of plain self-attention, whose heads stand side by side with those of `branch`.
    """

    before: Tensor | None
    after: Tensor | None
    shift: Tensor | None

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__()
        attention, branches = branch.fn, (branch, *beside)
        assert isinstance(attention, Attention)
        self.heads, self.scale = len(branches) * attention.heads, attention.scale
        self.in_keys = getattr(attention, "in_keys", True)
        self.form = form
        for name in ("before", "after", "shift"):
            self.register_buffer(name, None)
        if isinstance(attention, TalkingHeadsAttention):
            self.before, self.after = attention.proj_l.weight * self.scale, attention.proj_w.weight.clone()
            self.shift = attention.proj_w.bias.clone()
            self.scale = 1.0  # it is in `before`
        self.eps = norm_parts(branch.norm)[0]
        thirds = [[part.chunk(3) for part in _folded_projections(one)] for one in branches]
        weight, bias = stack_inputs(
            [(w[i], b[i]) for i in range(3) for w, b in thirds]
        )  # all q, then all k, then all v
        self.inner = len(weight) // 3
        self.qkv = FoldedLinear(weight, bias, form)
        self.few = FewQueries(weight, bias, self.heads, self.scale) if form.few and self.before is None else None
        projs = [fold_output(cast(Attention, one.fn).proj, one.scale) for one in branches]
        self.proj = FoldedLinear(*stack_outputs(projs), form)

    def mixing(self) -> list[Tensor]:
        """What mixes the heads, if they are mixed."""
        return [part for part in (self.before, self.after, self.shift) if part is not None]

    def weights(self) -> list[Tensor]:
        """As the kernel takes them."""
        mixing = self.mixing()
        return [*self.qkv.packed(), *self.proj.packed(), *(native.whole_mixing(*mixing) if mixing else ())]

    def forward(self, total: Tensor, x: Tensor, queries: int | None = None) -> Tensor:
        if self.form.kernels and queries is None:
            layers, mixing = (*self.qkv.packed(), *self.proj.packed()), self.mixing()
            rest = self.heads, self.inner, self.scale, self.eps, mixing
            torch.ops.patchloom.attention_(total, None if x is total else x, *layers, *rest)
            return total
        if queries is not None and self.few is not None and queries <= self.few.most:
            y = x if self.eps < 0 else F.layer_norm(x, x.shape[-1:], eps=self.eps)
            return self.proj.add_to(total, self.few(y[:, :queries], y if self.in_keys else y[:, queries:]))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x, queries))
        return self.proj.add_to(total, self.attend(q, k, v))

    def project(self, x: Tensor, queries: int | None) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, Q, inner) and twice (B, K, inner); inner is P D with P branches."""
        if queries is None:
            return self.qkv(x, self.eps).chunk(3, dim=-1)
        inner = self.inner
        source = x if self.in_keys else x[:, queries:]
        q, kv = self.qkv.part(x[:, :queries], 0, inner, self.eps), self.qkv.part(source, inner, 3 * inner, self.eps)
        return q, *kv.chunk(2, dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) and twice (B, H, K, d) -> (B, Q, inner)."""
        if self.before is None or self.after is None or self.shift is None:
            if self.form.kernels and q.shape[2] >= FEW_QUERIES:
                return torch.ops.patchloom.attention(q, k, v, self.scale, self.form.int8)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.form.kernels:
            return torch.ops.patchloom.talking_heads(q, k, v, self.before, self.after, self.shift)
        lift = self.shift[:, None, None] * v.sum(dim=-2, keepdim=True)
        return talking_heads_by_image(q, k, v, self.before, self.after, lift).transpose(1, 2).flatten(2)


class FewQueries(nn.Module):
    """Attention of few tokens to all, without keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor
    v_bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, heads: int, scale: float) -> None:
        super().__init__()
        inner = len(weight) // 3
        self.heads, self.scale = heads, scale
        self.most = few_queries(inner, heads)
        for name, part in zip(("q", "k", "v"), weight.split(inner), strict=True):
            self.register_buffer(name, part.clone() if name == "q" else part.unflatten(0, (heads, -1)).clone())
        self.register_buffer("q_bias", bias[:inner].clone())
        self.register_buffer("v_bias", bias[2 * inner :].unflatten(0, (heads, -1)).clone())

    def forward(self, asking: Tensor, y: Tensor) -> Tensor:
        """(B, Q, D), (B, N, D) -> (B, Q, inner), both normalised."""
        q = F.linear(asking, self.q, self.q_bias).mul_(self.scale).unflatten(-1, (self.heads, -1))
        return attend_without_keys(q, y, self.k, self.v, self.v_bias)


def _folded_projections(branch: Branch) -> tuple[Tensor, Tensor]:
    """Weights (3 D, D) and bias of q, k and v in a row, with the norm's affine."""
    _, *affine = norm_parts(branch.norm)
    return fold_input(*_projections(cast(Attention, branch.fn)), *affine)


def _projections(attention: Attention) -> tuple[Tensor, Tensor]:
    if isinstance(attention, SelfAttention):
        return attention.qkv.weight, attention.qkv.bias
    assert isinstance(attention, ClassAttention)
    layers = (attention.q, attention.k, attention.v)
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])


class FusedFFN(nn.Module):
    """total += scale(fc2(GELU(fc1(norm(x))))); `beside`: parallel FFNs, whose hidden channels stand side by side."""

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__()
        self.kernels = form.kernels
        self.eps = norm_parts(branch.norm)[0]
        parts = [(one, cast(FFN, one.fn)) for one in (branch, *beside)]
        inputs = [fold_input(*matrix_of(ffn.fc1), *norm_parts(one.norm)[1:]) for one, ffn in parts]
        self.fc1 = FoldedLinear(*stack_inputs(inputs), form)
        self.fc2 = FoldedLinear(*stack_outputs([fold_output(ffn.fc2, one.scale) for one, ffn in parts]), form)

    def weights(self) -> list[Tensor]:
        """As the kernel takes them."""
        return [*self.fc1.packed(), *self.fc2.packed()]

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if not self.kernels:
            return self.fc2.add_to(total, self.fc1(x, self.eps, activate=True))
        torch.ops.patchloom.ffn_(total, None if x is total else x, *self.weights(), self.fc1.outputs, self.eps)
        return total


class ActivatedFFN(FusedFFN):
    """total += scale(fc2(activation(fc1(norm(x))))) with another activation than GELU, which no kernel has."""

    def __init__(self, branch: Branch, form: Form, *beside: Branch) -> None:
        super().__init__(branch, form, *beside)
        assert isinstance(branch.fn, FFN)
        self.activation = branch.fn.activation

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        return self.fc2.add_to(total, IN_PLACE[self.activation](self.fc1(x, self.eps)))


class FusedCrossPatch(nn.Module):
    """total += gamma (A (alpha x + beta) + b) + lift
    = (gamma alpha) A x + (sums of A's rows) (gamma beta) + b gamma + lift."""

    lift: Tensor | None
    weight: Tensor
    channels: Tensor
    patches: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        mixing = branch.fn
        assert isinstance(mixing, CrossPatchLinear)
        _, alpha, beta = norm_parts(branch.norm)
        gamma, lift = scale_parts(branch.scale)
        dim = max(part.numel() for part in (alpha, beta, gamma))
        weight, bias = mixing.weight, mixing.bias.double()
        vectors = [part.to(weight).expand(dim) for part in (gamma * alpha, gamma * beta, gamma)]
        self.kernels = form.kernels and dim > 1
        self.register_buffer("lift", lift.to(weight).expand(dim).clone() if lift.any() else None)
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("channels", torch.stack([native.padded(v) if self.kernels else v for v in vectors]))
        self.register_buffer("patches", torch.stack([weight.double().sum(1), bias]).to(weight))

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if self.kernels and total is x:
            torch.ops.patchloom.cross_patch_(x, self.weight, self.channels, self.patches)
            return x if self.lift is None else x.add_(self.lift)
        scale, across, gain = self.channels[:, : x.shape[-1]]
        rows, shift = self.patches[:, :, None]
        mixed = self.weight @ x
        constant = rows * across + shift * gain
        return total.addcmul_(mixed, scale).add_(constant if self.lift is None else constant + self.lift)


class FusedConv(nn.Module):
    """total += scale(conv_branch(norm(x))): PatchConvNet's block on maps, where it is not part of a column."""

    squeeze: Tensor
    squeeze_bias: Tensor
    excite: Tensor
    excite_bias: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        conv = branch.fn
        assert isinstance(conv, ConvBranch)
        self.eps, *affine = norm_parts(branch.norm)
        self.expand = FoldedLinear(*fold_input(*matrix_of(conv.expand), *affine), form)
        self.depthwise = conv.depthwise
        reduce, expand = matrix_of(conv.squeeze_excite.conv_reduce), matrix_of(conv.squeeze_excite.conv_expand)
        room = -len(reduce[1]) % native.LANES  # channels that squeeze to nothing
        self.register_buffer("squeeze", F.pad(reduce[0].t(), (0, room)).contiguous())
        self.register_buffer("squeeze_bias", F.pad(reduce[1], (0, room)))
        self.register_buffer("excite", F.pad(expand[0].t(), (0, 0, 0, room)).contiguous())
        self.register_buffer("excite_bias", expand[1].clone())
        self.project = FoldedLinear(*fold_output(conv.project, branch.scale), form)

    def weights(self) -> list[Tensor]:
        """As the kernel takes them."""
        taps, shift = self.depthwise.weight.flatten(1).t(), cast(Tensor, self.depthwise.bias)
        gates = (self.squeeze, self.squeeze_bias, self.excite, self.excite_bias)
        return [*self.expand.packed(), taps, shift, *gates, *self.project.packed()]

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        y = torch.ops.aten.gelu_(convolve(self.depthwise, self.expand(x, self.eps, activate=True)))
        squeezed = F.relu(torch.addmm(self.squeeze_bias, y.mean(dim=(1, 2)), self.squeeze))
        return self.project.add_to(total, y, torch.addmm(self.excite_bias, squeezed, self.excite).sigmoid())


class FusedColumn(nn.Module):
    """Blocks one after another in one call of a kernel; `weights` (blocks, bytes)."""

    weights: Tensor

    def __init__(self, weights: list[list[Tensor]], dim: int, int8: bool, *eps: float) -> None:
        super().__init__()
        self.int8 = int8
        # a pair's rounding is that of its larger row: without LayerNorm nothing keeps rows of about one size
        self.paired = not int8 and min(eps) >= 0 and dim >= PAIRED
        self.register_buffer("weights", torch.stack([native.joined(block) for block in weights]))


class ConvColumn(FusedColumn):
    """PatchConvNet's blocks."""

    def __init__(self, branches: list[FusedConv], int8: bool) -> None:
        first = branches[0]
        super().__init__([branch.weights() for branch in branches], len(first.excite_bias), int8, first.eps)
        self.eps, self.squeezed = first.eps, len(first.squeeze_bias)

    def forward(self, x: Tensor, _: int | None = None) -> Tensor:
        x = _for_inference(x)
        torch.ops.patchloom.conv_blocks_(x, self.weights, self.squeezed, self.eps, self.paired, self.int8)
        return x


class AttentionColumn(FusedColumn):
    """Blocks of attention, plain or with talking heads, and FFN."""

    def __init__(self, blocks: list[tuple[FusedAttention, FusedFFN]], int8: bool) -> None:
        weights = [[*first.weights(), *second.weights()] for first, second in blocks]
        attention, ffn = blocks[0]
        super().__init__(weights, attention.proj.outputs, int8, attention.eps, ffn.eps)
        self.alike = self.settings(attention, ffn)

    @staticmethod
    def settings(first: FusedAttention, second: FusedFFN) -> tuple[int, int, int, bool, float, float, float]:
        """Heads, their channels, hidden channels, whether heads are mixed, scale of the scores, eps of both norms."""
        mixed = first.before is not None
        return first.heads, first.inner, second.fc1.outputs, mixed, first.scale, first.eps, second.eps

    def forward(self, x: Tensor, _: int | None = None) -> Tensor:
        x = _for_inference(x)
        torch.ops.patchloom.attention_blocks_(x, self.weights, *self.alike, self.paired, self.int8)
        return x


class FusedStem(nn.Module):
    """Convolutions of images (B, C, height, width) -> tokens (B, N, D): norms folded in, maps with channels last."""

    weights: Tensor

    def __init__(self, stages: list[Stage], form: Form) -> None:
        super().__init__()
        self.int8 = form.int8
        layers = [FoldedLinear(*stage.folded(), form) for stage in stages]
        self.register_buffer("weights", native.joined([part for layer in layers for part in layer.packed()]))
        self.stages = [number for stage in stages for number in stage.window()]

    def forward(self, images: Tensor) -> Tensor:
        maps = _for_inference(images).permute(0, 2, 3, 1)
        return torch.ops.patchloom.stem(maps, self.weights, self.stages, self.int8).flatten(1, 2)


class Stage(NamedTuple):
    """A convolution of a stem, and the norm of its map if there is one; all but a stem's last go through a GELU."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weights (outputs, side * side * C) and bias of a Linear of windows whose channels are last."""
        weight = self.conv.weight.permute(0, 2, 3, 1).flatten(1)
        bias = weight.new_zeros(len(weight)) if self.conv.bias is None else self.conv.bias
        if self.norm is None:
            return weight, bias
        alpha, beta = batch_norm_parts(self.norm)
        return (alpha[:, None] * weight.double()).to(weight), (alpha * bias.double() + beta).to(bias)

    def window(self) -> tuple[int, int, int, int]:
        """Outputs, side, step and padding."""
        assert isinstance(self.conv.padding, tuple)
        return self.conv.out_channels, self.conv.kernel_size[0], self.conv.stride[0], self.conv.padding[0]


def stages_of(stem: nn.Module) -> list[Stage] | None:
    """The convolutions of a stem with what belongs to them; None if there is a layer of another kind."""
    if not any(replaceable(stem, kind) for kind in (LinearStem, LinearThenStem, HMLPStem, ConvStem)):
        return None
    assert isinstance(stem, Stem)
    if hooked(stem.proj):
        return None
    layers = [stem.proj] if isinstance(stem.proj, nn.Conv2d) else list(stem.proj.children())
    if isinstance(layers[-1], nn.GELU):
        return None  # the kernel has none after the last convolution
    stages: list[Stage] = []
    for layer in layers:
        if replaceable(layer, nn.Conv2d):
            stages.append(Stage(cast(nn.Conv2d, layer), None))
        elif replaceable(layer, nn.BatchNorm2d):
            stages[-1] = Stage(stages[-1].conv, cast(nn.BatchNorm2d, layer))
        elif not replaceable(layer, nn.GELU):
            return None
    return stages


PAIRED = 128  # channels; with fewer, seven products cost what eight do (benchmarks/choices.py)
FEW_QUERIES = 8  # below, packing all keys for them costs what it gains or more (benchmarks/choices.py)
_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedAttention,
    TalkingHeadsAttention: FusedAttention,
    ClassAttention: FusedAttention,
    FFN: FusedFFN,
    CrossPatchLinear: FusedCrossPatch,
    ConvBranch: FusedConv,
}


_PLAIN = (Residual, Branch, nn.ModuleList, nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Identity, Affine, BatchNorm, DropPath,
          Scale, LayerScale, AffineScale, ScalarScale, FixupScale, SqueezeExcite, Pointwise, *_FUSED)  # fmt: skip


def _plain(module: nn.Module) -> bool:
    return any(replaceable(module, kind) for kind in _PLAIN)


def fuse_residual(residual: nn.Module, form: Form, in_place: bool = True) -> nn.Module:
    """The residual in its fused form; a gate other than addition, or a stand-in for a plain layer, stays as it is."""
    if (
        not isinstance(residual, Residual)
        or residual.gate is not None
        or not all(_plain(module) for module in residual.modules())
    ):
        return residual
    branches = [branch for branch in residual.branches if isinstance(branch, Branch)]
    if form.side_by_side and residual.norm is None and alike(branches):
        return FusedResidual([fuse_branch(branches[0], form, *branches[1:])], in_place)
    fused = FusedResidual([fuse_branch(branch, form) for branch in branches], in_place)
    return fused if residual.norm is None else PostNorm(fused, residual.norm)


def alike(branches: list[Branch]) -> bool:
    """Whether parallel branches can be one: all FFNs or all plain self-attentions, of one shape, eps and activation."""
    kinds = {(type(branch.fn), norm_parts(branch.norm)[0], *_shape(branch.fn)) for branch in branches}
    return len(branches) > 1 and len(kinds) == 1 and type(branches[0].fn) in (SelfAttention, FFN)


def _shape(fn: nn.Module) -> tuple[object, ...]:
    if isinstance(fn, Attention):
        return fn.heads, fn.scale
    return (fn.activation, fn.fc1.out_features) if isinstance(fn, FFN) else ()


def in_columns(network: Network, int8: bool, paired: bool) -> nn.ModuleList:
    """The blocks, those that are alike as one; not the last one where it may be asked for a few tokens alone."""
    if network.join_at not in (None, 0):
        return network.blocks
    last = [] if network.join_at is None else [network.blocks[-1]]
    column = column_of(network.blocks[: len(network.blocks) - len(last)], int8)
    if column is None:
        return network.blocks
    column.paired &= paired
    return nn.ModuleList([column, *last])


def column_of(blocks: nn.ModuleList, int8: bool) -> FusedColumn | None:
    """Blocks of one branch of PatchConvNet each, or of attention and an FFN, as one; None if they differ."""
    found = [branches_of(block) for block in blocks]
    kinds = {tuple(map(type, branches)) for branches in found}
    if kinds == {(FusedConv,)}:
        convs = [cast(FusedConv, conv) for (conv,) in found]
        alike = {(conv.eps, conv.squeeze.shape) for conv in convs}
        return ConvColumn(convs, int8) if len(alike) == 1 and len(convs[0].excite_bias) % native.LANES == 0 else None
    if kinds == {(FusedAttention, FusedFFN)}:
        pairs = [(cast(FusedAttention, first), cast(FusedFFN, second)) for first, second in found]
        columns = {AttentionColumn.settings(*pair) for pair in pairs}
        return AttentionColumn(pairs, int8) if len(columns) == 1 else None
    return None


def branches_of(block: nn.Module) -> list[nn.Module]:
    """The branches of a block, one after another; none if some are parallel, or the block is of another kind."""
    parts = [list(getattr(child, "branches", ())) for child in block.children()]
    alone = replaceable(block, Block) and all(len(part) == 1 for part in parts)
    return [branch for part in parts for branch in part] if alone else []


def fuse_branch(branch: Branch, form: Form, *beside: Branch) -> nn.Module:
    """The branch in its fused form, as one with the parallel ones `beside` it, which are `alike`."""
    kind = _FUSED.get(type(branch.fn))
    if kind is None or (kind is FusedCrossPatch and isinstance(branch.norm, nn.LayerNorm)):
        return branch  # statistics of each token do not go past a mixing of tokens
    if isinstance(branch.fn, FFN) and branch.fn.activation != "gelu":
        kind = ActivatedFFN
    return kind(branch, form, *beside)
