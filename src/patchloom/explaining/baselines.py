"""Maps that work for every network: Grad-CAM, from gradients, and occlusion, from the effect of hiding a region."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.images import to_input
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork

BATCH = 16  # images per forward pass; more are slower on a CPU
PLACES = 14  # positions of the hidden square along either side, at most


def network_input(network: Network, picture: np.ndarray) -> Tensor:
    """(1, 3, H, W), normalised, from the crop (H, W, 3) of uint8.

    Args:
        picture: the crop that the network sees, before normalisation.
    """
    own = next(network.parameters())
    return to_input(picture[None], network.preprocessing, own.device).to(own.dtype)


def log_probabilities(network: Network, images: Iterator[Tensor] | Tensor) -> Tensor:
    """Log-probabilities (images, classes) of images (B, C, height, width), or of an iterator of (C, height, width)."""
    found = []
    with torch.inference_mode():
        for batch in _batches(images):
            logits = network(batch)
            assert isinstance(logits, Tensor)
            found.append(logits.float().log_softmax(dim=-1))
    return torch.cat(found)


def _batches(images: Iterator[Tensor] | Tensor) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        yield from images.split(BATCH)
        return
    waiting: list[Tensor] = []
    for image in images:
        waiting.append(image)
        if len(waiting) == BATCH:
            yield torch.stack(waiting)
            waiting = []
    if waiting:
        yield torch.stack(waiting)


def grad_cam(network: PatchNetwork, x: Tensor, target: int) -> Tensor:
    """Grad-CAM of one image x (1, C, height, width): (grid height, grid width).

    relu(sum over channels c of w_c P_c), with patch tokens P and w_c the mean over patches of the gradient of the
    target's logit. P is the input of the last block if a class token is in the trunk, since the patches that come out
    of that block are not used; otherwise P is the output of the trunk.

    Args:
        target: the index of the class.

    Returns:
        Values from 0 on, not scaled.
    """
    kept: list[Tensor] = []

    def keep(tokens: Tensor) -> Tensor:
        # With frozen weights nothing requires a gradient: the tokens are made the leaf that is differentiated by.
        kept.append(tokens if tokens.requires_grad else tokens.detach().requires_grad_())
        return kept[-1]

    if network.join_at is not None:
        hook = network.blocks[-1].register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), *inputs[1:]))
    else:
        last = network.blocks[-1] if len(network.blocks) else network.stem
        hook = last.register_forward_hook(lambda _, __, output: keep(output))
    try:
        with torch.enable_grad():
            logits = network(x)
            assert isinstance(logits, Tensor)
            # Only down to these tokens: the layers before them are not differentiated.
            (gradient,) = torch.autograd.grad(logits[0, target], kept[0])
    finally:
        hook.remove()
    height, width = (side // network.config.patch_size for side in x.shape[2:])
    # tokens (1, N, D) and maps (1, height, width, D) both become (N, D); prefix tokens are cut off below
    patches, gradients = (values[0].detach().float().reshape(-1, values.shape[-1]) for values in (kept[0], gradient))
    patches, gradients = patches[-height * width :], gradients[-height * width :]
    return (patches @ gradients.mean(dim=0)).relu().unflatten(0, (height, width))


def occlusion(network: PatchNetwork, x: Tensor, target: int) -> Tensor:
    """Occlusion of one image x (1, C, height, width): (places down, places across).

    The drop of the target's log-probability when a square is replaced by the mean colour, averaged over the squares
    that cover a place; a rise counts as 0. Squares move by one patch (several in large images) and are a fifth of the
    grid wide, at least one patch.
    """
    windows, steps = zip(*(_window(side, network.config.patch_size) for side in x.shape[2:]), strict=True)
    corners = [
        (top, left)
        for top in _starts(x.shape[2], windows[0], steps[0])
        for left in _starts(x.shape[3], windows[1], steps[1])
    ]

    def hidden() -> Iterator[Tensor]:
        for top, left in corners:
            image = x[0].clone()
            image[:, top : top + windows[0], left : left + windows[1]] = 0  # the mean colour, as x is normalised
            yield image

    falls = (log_probabilities(network, x) - log_probabilities(network, hidden()))[:, target]
    total, covered = torch.zeros(2, 1, 1, *x.shape[2:], device=x.device).unbind(0)
    for (top, left), fall in zip(corners, falls, strict=True):
        total[..., top : top + windows[0], left : left + windows[1]] += fall
        covered[..., top : top + windows[0], left : left + windows[1]] += 1
    places = (math.ceil(x.shape[2] / steps[0]), math.ceil(x.shape[3] / steps[1]))
    return F.adaptive_avg_pool2d((total / covered).relu(), places)[0, 0]


def _window(side: int, patch: int) -> tuple[int, int]:
    """The width of the hidden square along one side of the image, and its step, in pixels."""
    cells = side // patch
    step = math.ceil(cells / PLACES)
    return patch * max(step, cells // 5), patch * step


def _starts(side: int, window: int, step: int) -> range:
    # The last square may reach over the border: slicing cuts it there, so that every pixel is covered.
    return range(0, side - window + step, step)
