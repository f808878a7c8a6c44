"""What there is to explain in a network without classes: how far an image is told from an empty one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.patch_network import PatchNetwork

NAMES = ("this image", "an empty image")
_LOGIT = 2.0  # of the image itself; minus this for an image of the mean colour


@torch.no_grad()
def likeness_network(network: PatchNetwork, x: Tensor) -> PatchNetwork:
    """A copy with a head of two classes that compares embeddings with that of the image x (1, C, height, width).

    The first logit rises from -2 for the embedding of an image of the mean colour to 2 for that of the image itself,
    along the line between them; the second is 0. What all embeddings have in common, which is most of them in a fresh
    network, then does not count. Maps and faithfulness say what the embedding rests on.
    """
    if network.per_class:
        raise PatchloomError(
            f"{network.config.name} has one query per class and no head: fine-tune it before it is explained."
        )
    own, nothing = (network.embed(image)[0].float() for image in (x, torch.zeros_like(x)))
    direction = (own - nothing) * (2 * _LOGIT / (own - nothing).square().sum().clamp_min(1e-12))
    compared = copy.deepcopy(network)
    compared.reset_head(len(NAMES))
    heads: list[Any] = compared.output_heads
    for head in heads:
        head.weight.zero_()
        head.bias.zero_()
        head.weight[0] = direction
        head.bias[0] = _LOGIT - direction @ own
    compared.class_names = NAMES
    return compared.eval()
