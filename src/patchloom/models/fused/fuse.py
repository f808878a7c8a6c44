"""Make a fused copy: which layer becomes which fused one, and which stay as they are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.kernels import libraries, native
from patchloom.layers.attention import Attention, ClassAttention, SelfAttention, TalkingHeadsAttention
from patchloom.layers.ffn import FFN
from patchloom.layers.inplace import hooked, replaceable
from patchloom.layers.mixing import ConvBranch, CrossPatchLinear, Pointwise, SqueezeExcite
from patchloom.layers.norms import Affine, BatchNorm
from patchloom.layers.residual import Block, Branch, DropPath, Residual
from patchloom.layers.scales import AffineScale, FixupScale, LayerScale, ScalarScale, Scale
from patchloom.models.embedding import EmbeddingNetwork
from patchloom.models.fused.attention import FusedAttention
from patchloom.models.fused.columns import in_columns
from patchloom.models.fused.ffn import ActivatedFFN, FusedFFN
from patchloom.models.fused.folding import Form, norm_parts
from patchloom.models.fused.mixing import FusedConv, FusedCrossPatch
from patchloom.models.fused.network import FusedNetwork
from patchloom.models.fused.residual import FusedResidual, PostNorm
from patchloom.models.fused.stem import FusedStem, stages_of
from patchloom.models.network import Network, unwrapped
from patchloom.models.patch_network import PatchNetwork


def fuse(
    model: nn.Module,
    class_token_only: bool = True,
    kernels: bool = True,
    int8: bool = False,
    paired: bool = True,
    side_by_side: bool = True,
) -> Network:
    """A copy of `model` for inference: faster, the same logits to float rounding; `model` stays as it is.

    A network of another library has no layers that are known here: its copy is in eval mode, without gradients.

    Args:
        class_token_only: The last block computes only what the logits need; `features` always gives every token.
        kernels: Use the C++ kernels where they can be used: float32 on a CPU that has the instructions.
        int8: Use int8 matrix multiplication, with the kernels: faster, slightly less accurate.
        paired: Use one Strassen step where that is faster: tokens in pairs share their rounding.
        side_by_side: Compute parallel branches of the same shape as one wider branch, not one after another.
    """
    network = copy.deepcopy(unwrapped(model)).eval().requires_grad_(False)
    if isinstance(network, EmbeddingNetwork):
        network.trunk = fuse(network.trunk, class_token_only, kernels, int8, paired, side_by_side)
        return network
    if not isinstance(network, PatchNetwork):
        if int8:
            raise PatchloomError(f"int8=True needs a network of patchloom's own, not {network.config.name}.")
        return network
    if isinstance(network, FusedNetwork):
        if int8 or not (kernels and paired and side_by_side):
            raise PatchloomError("This is a fused copy already: fuse the network that it was made from.")
        network.class_token_only = class_token_only
        return network
    # On other devices torch's own operators are fast.
    if not next(network.parameters()).is_cpu and not int8:  # the faster forms are for the CPU
        network.class_token_only = class_token_only
        return network
    form = _form(next(network.parameters()), kernels, int8)._replace(side_by_side=side_by_side)
    network.class_token_only = class_token_only
    in_place = not any(hooked(m) for m in network.modules())  # a hook may keep what it is shown
    _fuse_blocks(network, form, in_place)
    if int8 and not any(isinstance(module, FusedAttention | FusedFFN | FusedConv) for module in network.modules()):
        raise PatchloomError(f"int8=True changes nothing in the blocks of {network.config.name}: they cannot be fused.")
    if form.kernels and in_place:  # columns write over their input, as single residuals do
        network.blocks = in_columns(network, int8, paired)
    if form.kernels and (stages := stages_of(network.stem)):
        network.stem = FusedStem(stages, form)
    return FusedNetwork(network, in_place, libraries.instruction_set() if form.kernels else None)


def _form(parameter: Tensor, kernels: bool, int8: bool) -> Form:
    """What can be had of what was asked for."""
    here = parameter.is_cpu and parameter.dtype == torch.float32
    if int8 and not (kernels and here and native.available()):
        found = f"these weights are {parameter.dtype} on {parameter.device}." if not here else native.why_not()
        why = found if kernels else "kernels=False was asked for."
        raise PatchloomError(f"int8=True needs the C++ kernels and float32 weights on a CPU: {why}")
    return Form(kernels and here and native.available(), int8)


def _fuse_blocks(network: PatchNetwork, form: Form, in_place: bool) -> None:
    """Replace the residuals of every block. Those that compute a few tokens alone, the pool stage and the last block of
    a trunk with a class token, also get weights laid out for few queries."""
    last = (*network.pool, *(network.blocks[-1:] if network.join_at is not None else ()))
    for block in (block for stage in (network.blocks, network.pool) for block in stage if isinstance(block, Block)):
        few = form._replace(few=block in last)
        for name, residual in block.named_children():
            setattr(block, name, fuse_residual(residual, few, in_place))


# the fused form of a branch, by what the branch computes
_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedAttention,
    TalkingHeadsAttention: FusedAttention,
    ClassAttention: FusedAttention,
    FFN: FusedFFN,
    CrossPatchLinear: FusedCrossPatch,
    ConvBranch: FusedConv,
}
# what may be inside a residual whose weights are read instead of called
_PLAIN = (Residual, Branch, nn.ModuleList, nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Identity, Affine, BatchNorm, DropPath,
          Scale, LayerScale, AffineScale, ScalarScale, FixupScale, SqueezeExcite, Pointwise, *_FUSED)  # fmt: skip


def _plain(module: nn.Module) -> bool:
    """Whether a layer computes what its type says: no subclass, hook or forward of its own."""
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


def fuse_branch(branch: Branch, form: Form, *beside: Branch) -> nn.Module:
    """The branch in its fused form, as one with the parallel ones `beside` it, which are `alike`."""
    kind = _FUSED.get(type(branch.fn))
    if kind is None or (kind is FusedCrossPatch and isinstance(branch.norm, nn.LayerNorm)):
        # LayerNorm divides each token by its own deviation. A cross-patch layer sums over tokens, so this factor
        # cannot move behind it; Affine and BatchNorm have factors per channel, which can.
        return branch  # statistics of each token do not go past a mixing of tokens
    if isinstance(branch.fn, FFN) and branch.fn.activation != "gelu":
        kind = ActivatedFFN
    return kind(branch, form, *beside)
