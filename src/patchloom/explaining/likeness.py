"""What there is to explain in a network without classes: how like its own embedding an image stays."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.models.patch_network import PatchNetwork

NAMES = ("this image", "other images")
_LOGIT = 2.0  # of the image itself; minus this where nothing of its embedding is left


@torch.no_grad()
def likeness_network(network: PatchNetwork, x: Tensor) -> PatchNetwork:
    """A copy with a head of two classes that compares embeddings with that of the image x (1, C, height, width).

    The first logit rises with the projection on the image's own embedding, from -2 where there is none to 2 for the
    image itself; the second is 0. Maps and faithfulness then say what the embedding rests on.
    """
    if network.per_class:
        raise PatchloomError(
            f"{network.config.name} has one query per class and no head: fine-tune it before it is explained."
        )
    embedding = network.embed(x)[0].float()
    compared = copy.deepcopy(network)
    compared.reset_head(len(NAMES))
    heads: list[Any] = compared.output_heads
    for head in heads:
        for parameter in head.parameters():
            parameter.zero_()
        head.weight[0] = 2 * _LOGIT * embedding / embedding.square().sum().clamp_min(1e-12)
        head.bias[0] = -_LOGIT
    compared.class_names = NAMES
    return compared.eval()
