"""Where a pre-trained network looks: the class token's attention in the last block, in the style of thesis Fig. 5.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from patchloom.layers.attention import capture_attention
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork
from patchloom.tasks.pretraining.pictures import figure, heat, row
from patchloom.training.report import Section

_HEADS = 6  # that are shown of an image, beside their mean


def attention_section(network: Network, pictures: Sequence[Image.Image], images: Tensor) -> Section:
    """Each picture with its maps: of every head of the last attention of a class token, or, in a network without one,
    the cosine of each patch with the embedding."""
    attention = last_attention(network, images)
    if attention is None:
        maps = patch_likeness(network, images)[:, None]
        names, title = ["cosine with the embedding"], "Patches that are like the whole image"
        note = "The network has no class token. Bright patches have features like the embedding of the image."
    else:
        maps = torch.cat([attention.mean(dim=1, keepdim=True), attention[:, :_HEADS]], dim=1)
        names = ["mean of the heads", *(f"head {i}" for i in range(maps.shape[1] - 1))]
        title, note = "Attention of the last block", "What the class token attends to, by head; bright is most."
    rows = [
        row([figure(picture, "image"), *(figure(heat(one), name) for one, name in zip(each, names, strict=True))])
        for picture, each in zip(pictures, maps, strict=True)
    ]
    return title, f"<p>{note}</p>{'<hr>'.join(rows)}"


def last_attention(network: Any, images: Tensor) -> Tensor | None:
    """The attention of the first prefix token to the patches, in the last layer in which it attends to them: (B, heads,
    height, width). None without such a layer."""
    if not isinstance(network, PatchNetwork) or not network.num_prefix:
        return None
    height, width = network.config.grid
    with torch.no_grad(), capture_attention(network) as captured:
        network.embed(images)
    found = [weights for weights in captured.values() if weights.shape[-1] >= height * width]
    # The keys end with the patches.
    return found[-1][:, :, 0, -height * width :].unflatten(-1, (height, width)).float() if found else None


def patch_likeness(network: Any, images: Tensor) -> Tensor:
    """The cosine of every patch's features with the mean of them, (B, height, width)."""
    with torch.no_grad():
        grid = F.normalize(network.features(images).grid.float(), dim=1)  # (B, D, height, width)
    return (grid * F.normalize(grid.mean(dim=(2, 3), keepdim=True), dim=1)).sum(dim=1)
