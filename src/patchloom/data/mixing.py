"""What happens to a batch on the device: normalising, erasing, Mixup and CutMix, drawn from the batch's generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchloom.data import native
from patchloom.data.randomness import seed_of


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(B, height, width, C) uint8 -> (B, C, height, width) float32 with the mean subtracted, divided by std."""
    # Mean and std are for pixels in 0 to 1; times 255 they apply to the bytes directly, without another pass.
    centre, scale = (torch.tensor(values, dtype=torch.float32, device=images.device) * 255 for values in (mean, std))
    if images.device.type == "cpu" and images.dtype == torch.uint8 and images.shape[3] == 3 and native.available():
        return native.normalise(images, centre, scale).permute(0, 3, 1, 2)
    x = images.permute(0, 3, 1, 2).float()
    return x.sub_(centre[:, None, None]).div_(scale[:, None, None])


def erase(images: Tensor, probability: float, *seed: int | str) -> Tensor:
    """Random erasing, in place: a box of 2 % to 1/3 of the area, aspect 0.3 to 1/0.3, filled with N(0, 1) per pixel.

    Args:
        images: normalised (B, C, height, width), changed in place and returned; N(0, 1) is noise in these units.
        probability: of each image to be erased.
        seed: parts of the seed of this batch.
    """
    draw = np.random.default_rng(seed_of(*seed, "erase"))
    noise = torch.Generator().manual_seed(seed_of(*seed, "noise"))
    channels, height, width = images.shape[1:]
    for image in images:
        if draw.random() >= probability:
            continue
        for _ in range(10):
            area = draw.uniform(0.02, 1 / 3) * height * width
            aspect = math.exp(draw.uniform(math.log(0.3), -math.log(0.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h < height and w < width:
                top, left = int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1))
                # Noise is drawn on the CPU and copied: generators of devices give other numbers from the same seed.
                image[:, top : top + h, left : left + w] = torch.randn(channels, h, w, generator=noise)
                break
    return images


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B,) labels -> (B, classes): 1 - e + e / K for the label, e / K for the others."""
    off = smoothing / classes
    targets = torch.full((labels.shape[0], classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


@dataclass(frozen=True)
class Mixing:
    """Mixup and CutMix as in the published script: one choice and one weight per batch, partners in reversed order.

    Args:
        mixup, cutmix: alpha of Beta(alpha, alpha) for the share; 0 disables the kind.
        probability: of mixing a batch at all.
        switch: probability of CutMix where both kinds are enabled.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    @property
    def active(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0

    def __call__(self, images: Tensor, targets: Tensor, *seed: int | str) -> tuple[Tensor, Tensor]:
        """Mixed images (written over) and targets (B, classes)."""
        draw = np.random.default_rng(seed_of(*seed, "mix"))
        if not self.active or draw.random() >= self.probability:
            return images, targets
        both = self.mixup > 0 and self.cutmix > 0
        cut = draw.random() < self.switch if both else self.cutmix > 0
        alpha = self.cutmix if cut else self.mixup
        share = float(draw.beta(alpha, alpha))
        if cut:
            # The box is cut at the borders, so the share of labels is computed from the box as it is.
            share = _paste(images, share, draw)
        else:
            # Image i is mixed with image B - 1 - i: no permutation to draw, as in the published script.
            images = images * share + images.flip(0) * (1 - share)
        return images, targets * share + targets.flip(0) * (1 - share)


def _paste(images: Tensor, share: float, draw: np.random.Generator) -> float:
    """A box of the partner over each image; the share that is left, from the box as clipped at the borders."""
    height, width = images.shape[2:]
    # A box of area (1 - share) H W, with the proportions of the image (CutMix, Eq. 2).
    side = math.sqrt(1 - share)
    cut_h, cut_w = int(height * side), int(width * side)
    row, column = int(draw.integers(height)), int(draw.integers(width))
    top, bottom = max(0, row - cut_h // 2), min(height, row + cut_h // 2)
    left, right = max(0, column - cut_w // 2), min(width, column + cut_w // 2)
    # flip copies, so that pixels that were pasted before are not pasted on.
    images[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    return 1 - (bottom - top) * (right - left) / (height * width)
