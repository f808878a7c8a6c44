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
from patchloom.kernels import native
from patchloom.layers.attention import (
    Attention,
    ClassAttention,
    SelfAttention,
    TalkingHeadsAttention,
    talking_heads_by_image,
)
from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import hooked, replaceable
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear, Pointwise, SqueezeExcite, convolve
from patchloom.layers.norms import Affine, BatchNorm
from patchloom.layers.residual import Block, Branch, DropPath, Residual
from patchloom.layers.scales import FixupScale, LayerScale, ScalarScale, Scale
from patchloom.layers.stems import Stem
from patchloom.models.network import Network, unwrapped


def fuse(model: nn.Module, class_token_only: bool = True, kernels: bool = True, int8: bool = False) -> Network:
    """A copy of `model` for inference: faster, the same logits to float rounding; `model` stays as it is.

    class_token_only   the last block computes what the logits need and no more; `features` always gives every token
    kernels            use the C++ kernels where they can be used: float32 on a CPU that has the instructions
    int8               multiply bytes, with the kernels: not exact, faster still
    """
    network = copy.deepcopy(unwrapped(model)).eval().requires_grad_(False)
    if network.fused:
        if int8 or not kernels:
            raise PatchloomError("This is a fused copy already: fuse the network that it was made from.")
        network.class_token_only = class_token_only
        return network
    form = _form(next(network.parameters()), kernels, int8)
    network.class_token_only = class_token_only
    network.fused = True
    in_place = not any(hooked(module) for module in network.modules())  # a hook may keep what it is shown
    for stage in (network.blocks, network.pool):
        for block in filter(lambda block: isinstance(block, Block), stage):
            for name, residual in block.named_children():
                setattr(block, name, fuse_residual(residual, form, in_place))
    if form.kernels and (convs := column_of(network.blocks)):
        network.blocks = nn.ModuleList([FusedColumn(convs)])
    if form.kernels and (stages := stages_of(network.stem)):
        network.stem = FusedStem(stages, form)
    parts = (*network.blocks.buffers(), *network.pool.buffers())
    if int8 and not any(part.dtype == torch.int8 for part in parts):
        raise PatchloomError(f"int8=True changes nothing in the blocks of {network.config.name}: they cannot be fused.")
    return network


def _form(parameter: Tensor, kernels: bool, int8: bool) -> Form:
    """What can be had of what was asked for."""
    here = parameter.is_cpu and parameter.dtype == torch.float32
    if int8 and not (kernels and here and native.available()):
        found = f"these weights are {parameter.dtype} on {parameter.device}." if not here else native.why_not()
        why = found if kernels else "kernels=False was asked for."
        raise PatchloomError(f"int8=True needs the C++ kernels and float32 weights on a CPU: {why}")
    return Form(kernels and here and native.available(), int8)


class Form(NamedTuple):
    """How a fused copy computes: with the C++ kernels, and there with products of bytes."""

    kernels: bool
    int8: bool = False


class FoldedLinear(nn.Module):
    """A Linear whose weights are laid out as the kernel wants them, or as they are for torch."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, form: Form) -> None:
        super().__init__()
        self.outputs = len(weight)
        self.kernels = form.kernels
        if form.kernels:
            weight, bias = native.pack_bytes(weight, bias) if form.int8 else native.pack(weight, bias)
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("bias", bias.contiguous())

    def forward(self, x: Tensor, eps: float = -1.0, activate: bool = False) -> Tensor:
        """Of x (..., D), normalised when eps >= 0; through a GELU when told to."""
        return self._apply_part(x, self.weight, self.bias, self.outputs, eps, activate)

    def part(self, x: Tensor, first: int, last: int, eps: float = -1.0) -> Tensor:
        """Outputs first to last alone."""
        if not self.kernels:
            return self._apply_part(x, self.weight[first:last], self.bias[first:last], last - first, eps, False)
        width = self.bias.shape[-1]
        if first % width or last % width:
            return self(x, eps)[..., first:last]
        panels = slice(first // width, last // width)
        return self._apply_part(x, self.weight[panels], self.bias[panels], last - first, eps, False)

    def _apply_part(self, x: Tensor, weight: Tensor, bias: Tensor, outputs: int, eps: float, activate: bool) -> Tensor:
        if self.kernels:
            return torch.ops.patchloom.linear(x, weight, bias, outputs, eps, activate)
        y = F.linear(x if eps < 0 else F.layer_norm(x, x.shape[-1:], eps=eps), weight, bias)
        return torch.ops.aten.gelu_(y) if activate else y

    def add_to(self, total: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """total += Linear(x), or Linear(gate * x) with a gate (B, D)."""
        if self.kernels:
            torch.ops.patchloom.linear_(total, x, self.weight, self.bias, gate)
            return total
        if gate is not None:
            x = x * gate.view(len(gate), *(1,) * (x.ndim - 2), -1)
        return total.add_(F.linear(x, self.weight, self.bias))


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


def _for_inference(x: Tensor) -> Tensor:
    if x.requires_grad:
        raise PatchloomError("A fused copy is for inference: take gradients of the network that it was made from.")
    return x.contiguous()


class FusedAttention(nn.Module):
    """total += scale(attention(norm(x))), for self-attention, talking heads and class-attention."""

    before: Tensor | None
    after: Tensor | None
    shift: Tensor | None

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        attention = branch.fn
        assert isinstance(attention, Attention)
        self.heads, self.scale = attention.heads, attention.scale
        self.in_keys = getattr(attention, "in_keys", True)
        self.form = form
        for name in ("before", "after", "shift"):
            self.register_buffer(name, None)
        self.eps, *affine = norm_parts(branch.norm)
        self.qkv = FoldedLinear(*fold_input(*_projections(attention), *affine), form)
        self.proj = FoldedLinear(*fold_output(attention.proj, branch.scale), form)
        if isinstance(attention, TalkingHeadsAttention):
            self.before, self.after = attention.proj_l.weight * self.scale, attention.proj_w.weight.clone()
            self.shift = attention.proj_w.bias.clone()

    def forward(self, total: Tensor, x: Tensor, queries: int | None = None) -> Tensor:
        dim = x.shape[-1]
        if self.form.kernels and queries is None:
            mixing = [] if self.before is None else [self.before, self.after, self.shift]
            torch.ops.patchloom.attention_(
                total, None if x is total else x, self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias,
                self.heads, 1.0 if mixing else self.scale, self.eps, mixing,
            )  # fmt: skip
            return total
        if queries is None:
            q, k, v = self.qkv(x, self.eps).chunk(3, dim=-1)
        else:
            q = self.qkv.part(x[:, :queries], 0, dim, self.eps)
            k, v = self.qkv.part(x if self.in_keys else x[:, queries:], dim, 3 * dim, self.eps).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        return self.proj.add_to(total, self.attend(q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) and twice (B, H, K, d) -> (B, Q, D)."""
        if self.before is None or self.after is None or self.shift is None:
            if self.form.kernels and q.shape[2] >= FEW_QUERIES:
                return torch.ops.patchloom.attention(q, k, v, self.scale, self.form.int8)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.form.kernels:
            return torch.ops.patchloom.talking_heads(q, k, v, self.before, self.after, self.shift)
        lift = self.shift[:, None, None] * v.sum(dim=-2, keepdim=True)
        return talking_heads_by_image(q, k, v, self.before, self.after, lift).transpose(1, 2).flatten(2)


def _projections(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weights (3 D, D) and bias of q, k and v in a row."""
    if isinstance(attention, SelfAttention):
        return attention.qkv.weight, attention.qkv.bias
    assert isinstance(attention, ClassAttention)
    layers = (attention.q, attention.k, attention.v)
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])


class FusedFFN(nn.Module):
    """total += scale(fc2(GELU(fc1(norm(x)))))."""

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        ffn = branch.fn
        assert isinstance(ffn, FFN)
        self.kernels = form.kernels
        self.eps, *affine = norm_parts(branch.norm)
        self.fc1 = FoldedLinear(*fold_input(*_matrix(ffn.fc1), *affine), form)
        self.fc2 = FoldedLinear(*fold_output(ffn.fc2, branch.scale), form)

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if not self.kernels:
            return self.fc2.add_to(total, self.fc1(x, self.eps, activate=True))
        fc1, fc2 = self.fc1, self.fc2
        torch.ops.patchloom.ffn_(
            total, None if x is total else x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, fc1.outputs, self.eps
        )
        return total


class FusedCrossPatch(nn.Module):
    """total += gamma (A (alpha x + beta) + b) = (gamma alpha) A x + (sums of A's rows) (gamma beta) + b gamma."""

    weight: Tensor
    channels: Tensor
    patches: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        mixing = branch.fn
        assert isinstance(mixing, CrossPatchLinear)
        _, alpha, beta = norm_parts(branch.norm)
        gamma, _ = scale_parts(branch.scale)
        dim = max(part.numel() for part in (alpha, beta, gamma))
        weight, bias = mixing.weight, mixing.bias.double()
        vectors = [part.to(weight).expand(dim) for part in (gamma * alpha, gamma * beta, gamma)]
        self.kernels = form.kernels and dim > 1
        self.register_buffer("weight", weight.clone())
        self.register_buffer("channels", torch.stack([native.padded(v) if self.kernels else v for v in vectors]))
        self.register_buffer("patches", torch.stack([weight.double().sum(1), bias]).to(weight))

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if self.kernels and total is x:
            torch.ops.patchloom.cross_patch_(x, self.weight, self.channels, self.patches)
            return x
        scale, across, gain = self.channels[:, : x.shape[-1]]
        rows, shift = self.patches[:, :, None]
        mixed = self.weight @ x
        return total.addcmul_(mixed, scale).add_(rows * across + shift * gain)


class FusedConv(nn.Module):
    """total += scale(conv_branch(norm(x))): PatchConvNet's block on maps."""

    taps: Tensor
    squeeze: Tensor
    squeeze_bias: Tensor
    excite: Tensor
    excite_bias: Tensor

    def __init__(self, branch: Branch, form: Form) -> None:
        super().__init__()
        conv = branch.fn
        assert isinstance(conv, ConvBranch)
        self.eps, *affine = norm_parts(branch.norm)
        self.expand = FoldedLinear(*fold_input(*_matrix(conv.expand), *affine), form)
        self.depthwise = conv.depthwise
        self.register_buffer("taps", conv.depthwise.weight.flatten(1).t().contiguous())
        reduce, expand = _matrix(conv.squeeze_excite.conv_reduce), _matrix(conv.squeeze_excite.conv_expand)
        room = -len(reduce[1]) % LANES  # channels that squeeze to nothing
        self.register_buffer("squeeze", F.pad(reduce[0].t(), (0, room)).contiguous())
        self.register_buffer("squeeze_bias", F.pad(reduce[1], (0, room)))
        self.register_buffer("excite", F.pad(expand[0].t(), (0, 0, 0, room)).contiguous())
        self.register_buffer("excite_bias", expand[1].clone())
        self.kernels = form.kernels and len(self.excite_bias) % LANES == 0
        self.project = FoldedLinear(*fold_output(conv.project, branch.scale), form)

    def weights(self) -> list[Tensor]:
        """As the kernel takes them."""
        first = [self.expand.weight, self.expand.bias, self.taps, cast(Tensor, self.depthwise.bias)]
        return [*first, *self.gates(), self.project.weight, self.project.bias]

    def gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.squeeze, self.squeeze_bias, self.excite, self.excite_bias

    def forward(self, total: Tensor, x: Tensor, _: int | None = None) -> Tensor:
        if self.kernels:
            torch.ops.patchloom.conv_branches_(total, None if x is total else x, self.weights(), self.eps)
            return total
        gates = self.gates()
        y = torch.ops.aten.gelu_(convolve(self.depthwise, self.expand(x, self.eps, activate=True)))
        squeezed = F.relu(torch.addmm(gates[1], y.mean(dim=(1, 2)), gates[0]))
        return self.project.add_to(total, y, torch.addmm(gates[3], squeezed, gates[2]).sigmoid())


class FusedColumn(nn.Module):
    """A PatchConvNet's blocks, one after another in one call of the kernel."""

    def __init__(self, branches: list[FusedConv]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.eps = branches[0].eps

    def forward(self, x: Tensor, _: int | None = None) -> Tensor:
        x = _for_inference(x)
        weights = [weight for branch in self.branches for weight in cast(FusedConv, branch).weights()]
        torch.ops.patchloom.conv_branches_(x, None, weights, self.eps)
        return x


class FusedStem(nn.Module):
    """Convolutions of images (B, C, height, width) -> tokens (B, N, D): norms folded in, maps with channels last."""

    def __init__(self, stages: list[Stage], form: Form) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FoldedLinear(*stage.folded(), form) for stage in stages)
        self.windows = [stage.window() for stage in stages]

    def forward(self, images: Tensor) -> Tensor:
        x = _for_inference(images).permute(0, 2, 3, 1)
        for number, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True), 1):
            activate = number < len(self.windows)
            x = torch.ops.patchloom.convolution(x, layer.weight, layer.bias, layer.outputs, *window, activate)
        return x.flatten(1, 2)


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

    def window(self) -> tuple[int, int, int]:
        """Side, step and padding."""
        assert isinstance(self.conv.padding, tuple)
        return self.conv.kernel_size[0], self.conv.stride[0], self.conv.padding[0]


def stages_of(stem: nn.Module) -> list[Stage] | None:
    """The convolutions of a stem with what belongs to them; None if there is a layer of another kind."""
    if not isinstance(stem, Stem) or not replaceable(stem, type(stem)) or hooked(stem.proj):
        return None
    layers = [stem.proj] if isinstance(stem.proj, nn.Conv2d) else list(stem.proj.children())
    stages: list[Stage] = []
    for layer in layers:
        if replaceable(layer, nn.Conv2d):
            stages.append(Stage(cast(nn.Conv2d, layer), None))
        elif replaceable(layer, nn.BatchNorm2d):
            stages[-1] = Stage(stages[-1].conv, cast(nn.BatchNorm2d, layer))
        elif not replaceable(layer, nn.GELU):
            return None
    return stages


LANES = 16  # floats of the widest vector
FEW_QUERIES = 32  # below, packing all keys for them costs what it gains or more (benchmarks/choices.py)
_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedAttention,
    TalkingHeadsAttention: FusedAttention,
    ClassAttention: FusedAttention,
    FFN: FusedFFN,
    CrossPatchLinear: FusedCrossPatch,
    ConvBranch: FusedConv,
}


_PLAIN = (Residual, Branch, nn.ModuleList, nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Identity, Affine, BatchNorm, DropPath,
          Scale, LayerScale, ScalarScale, FixupScale, SqueezeExcite, Pointwise, *_FUSED)  # fmt: skip


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
    return FusedResidual([fuse_branch(branch, form) for branch in branches], in_place)


def column_of(blocks: nn.ModuleList) -> list[FusedConv]:
    """The branches of blocks that are each a PatchConvNet's; none if there is a block of another kind."""
    found: list[FusedConv] = []
    for block in blocks:
        branches = [branch for child in block.children() for branch in getattr(child, "branches", [None])]
        if len(branches) != 1 or not isinstance(branches[0], FusedConv) or not replaceable(block, Block):
            return []
        found += branches
    alike = len({(branch.kernels, branch.eps) for branch in found}) == 1
    return found if alike and found[0].kernels else []


def fuse_branch(branch: Branch, form: Form) -> nn.Module:
    kind = _FUSED.get(type(branch.fn))
    if kind is None or (kind is FusedCrossPatch and isinstance(branch.norm, nn.LayerNorm)):
        return branch  # statistics of each token do not go past a mixing of tokens
    if kind is FusedCrossPatch and isinstance(branch.scale, FixupScale):
        return branch
    return kind(branch, form)


_ONE_AND_ZERO = torch.ones((), dtype=torch.double), torch.zeros((), dtype=torch.double)  # scalars go to any device


def norm_parts(norm: nn.Module) -> tuple[float, Tensor, Tensor]:
    """(eps, alpha, beta): alpha * x + beta, of the normalised x when eps >= 0; in double precision."""
    if isinstance(norm, nn.LayerNorm):
        return norm.eps, norm.weight.double(), norm.bias.double()
    if isinstance(norm, Affine):
        return -1.0, norm.alpha.double(), norm.beta.double()
    if isinstance(norm, BatchNorm):
        return -1.0, *batch_norm_parts(norm)
    assert isinstance(norm, nn.Identity), type(norm)
    return -1.0, *_ONE_AND_ZERO


def batch_norm_parts(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """(alpha, beta) of the running statistics, in double precision."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    alpha = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return alpha, norm.bias.double() - norm.running_mean.double() * alpha


def scale_parts(scale: Scale) -> tuple[Tensor, Tensor]:
    """(gamma, bias) of what multiplies a branch, in double precision."""
    one, zero = _ONE_AND_ZERO
    if isinstance(scale, LayerScale):
        return scale.gamma.double(), zero
    if isinstance(scale, ScalarScale):
        return scale.alpha.double(), scale.bias.double() if isinstance(scale, FixupScale) else zero
    return one, zero


def fold_input(weight: Tensor, bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """W (alpha x + beta) + b as one Linear of x."""
    wide = weight.double()
    return (wide * alpha).to(weight), (bias.double() + (wide * beta).sum(dim=1)).to(bias)


def fold_output(layer: nn.Linear | nn.Conv2d, scale: Scale) -> tuple[Tensor, Tensor]:
    """scale(W x + b) as one Linear of x."""
    weight, bias = _matrix(layer)
    gamma, lift = scale_parts(scale)
    return (weight.double().t() * gamma).t().to(weight), (bias.double() * gamma + lift).to(bias)


def _matrix(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Weights (outputs, inputs) and bias of a Linear, or of a convolution that is one."""
    assert layer.bias is not None
    return layer.weight.flatten(1), layer.bias
