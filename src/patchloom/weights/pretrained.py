"""Files of self-supervised pre-training as the authors of DINO, MAE and BeiT write them: the encoder, and what each
method has beside it.

DINO: a student and a teacher, each a backbone with a projection head. MAE: an encoder, a mask token and a decoder.
BeiT: an encoder whose attention has no bias for keys, a mask token and a head that predicts codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.weights.layouts import State

_BACKBONE = "backbone."  # DINO's prefix of what is not the projection head
# tensors of a method that its encoder does not use, by the beginnings of their names
_BESIDE = {
    "decoder_": "part of MAE's decoder",
    "mask_token": "the mask token of pre-training",
    "lm_head.": "the head of BeiT that predicts codes",
}
_RELATIVE = "relative_position_bias_table"


def encoder_of(state: Mapping[str, Tensor], label: str) -> tuple[State, dict[str, str]]:
    """The encoder in the tensors of a file, and what was left out: names with the reason.

    Tensors of other files come back as they are. Raises PatchloomError for encoders that compute something else than
    a vision transformer here: those with a relative position bias (BeiT), and those that normalise the average of
    the patches (fine-tuned MAE and BeiT).

    Args:
        state: Tensors under the names of the file.
        label: The file, for errors.
    """
    _refuse_other_networks(state, label)
    encoder = {name.removeprefix(_BACKBONE): tensor for name, tensor in state.items() if _in_backbone(name, state)}
    ignored = {name: "part of DINO's projection head" for name in state if not _in_backbone(name, state)}
    for name in list(encoder):
        reason = next((reason for start, reason in _BESIDE.items() if name.startswith(start)), None)
        if reason is not None:
            ignored[name] = reason
            del encoder[name]
    return _with_whole_biases(encoder, label), ignored


def _in_backbone(name: str, state: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is of the backbone; in a file without that prefix every tensor is."""
    return name.startswith(_BACKBONE) or not any(other.startswith(_BACKBONE) for other in state)


def _refuse_other_networks(state: Mapping[str, Tensor], label: str) -> None:
    use_timm = "timm's network computes it: timm:NAME:FILE loads such a file in timm's layout."
    if found := next((name for name in state if name.endswith(_RELATIVE)), None):
        raise PatchloomError(
            f"{label} has a relative position bias ({found}), as BeiT does; the attention of patchloom's networks has "
            f"none, only positions added to the patches. {use_timm}"
        )
    if any(name.startswith("fc_norm.") for name in state):
        raise PatchloomError(
            f"{label} has the tensors fc_norm.*: it normalises the average of its patches, as fine-tuned MAE and BeiT "
            f"do, while patchloom's vision transformers average normalised patches. {use_timm}"
        )


def _with_whole_biases(state: State, label: str) -> State:
    """BeiT's biases of queries and values as one of queries, keys and values, with zeros for the keys, (3 D)."""
    joined = {name: tensor for name, tensor in state.items() if not re.search(r"\.attn\.[qv]_bias$", name)}
    for name in (name for name in state if name.endswith(".attn.q_bias")):
        attention = name.removesuffix("q_bias")
        queries, values = state[name], state.get(f"{attention}v_bias")
        if values is None or values.shape != queries.shape:
            raise PatchloomError(f"{label} has {name}, but no {attention}v_bias of the same shape.")
        joined[f"{attention}qkv.bias"] = torch.cat([queries, torch.zeros_like(queries), values])
    return joined
