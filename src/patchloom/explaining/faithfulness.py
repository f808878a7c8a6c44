"""Faithfulness of maps: does the probability of the class fall when salient pixels are removed, and rise when they are
added?

Deletion blurs pixels, the most salient first; insertion starts from a blurred image and restores pixels in the same
order (Petsiuk et al.). The area under the curve of the probability is small for a good deletion and large for a good
insertion. Both are compared with random maps of the same power spectrum, hence of the same smoothness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from patchloom.explaining.baselines import log_probabilities, network_input
from patchloom.models.network import Network

RANDOM_MAPS = 16  # a random map is better than all of them with probability 1/17
STEPS = 6  # of a curve, from no pixel to all pixels
LEAST = 1e-6  # smallest difference of areas that counts


def faithfulness(
    network: Network, picture: np.ndarray, maps: Mapping[str, np.ndarray], targets: Mapping[str, int], seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Scores of each map: deletion and insertion (areas), random (mean and std over random maps), beaten (the share of
    random maps that are worse, for each score) and verdict.

    `picture` is the input crop, (H, W, 3) uint8; maps are (H, W); `targets` has the class that each map explains. The
    deletion area of a random map r also counts for insertion: deleting in the order of r is inserting in the order of
    -r read backwards, and r and -r are equally likely.
    """
    x, blurred = (network_input(network, one)[0] for one in _pair(picture))
    generator = np.random.default_rng(seed)
    ranks = []
    for values in maps.values():
        order = _ranks(values, values, generator)
        ranks += [order, 1 - order]  # deletion, and insertion as a deletion read backwards
        ranks += [_ranks(random_like(values, generator), values, generator) for _ in range(RANDOM_MAPS)]
    areas = _areas(network, x, blurred, ranks).unflatten(0, (len(maps), -1))
    return {name: _compare(*areas[i, :, targets[name]].split((1, 1, RANDOM_MAPS))) for i, name in enumerate(maps)}


def random_like(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A random map with the power spectrum of `values`, (H, W): the same amplitudes, phases of white noise."""
    noise = np.fft.rfft2(generator.standard_normal(values.shape))
    # Amplitude 1 and the phase of white noise; rfft2 keeps the symmetry that makes the inverse real.
    phases = noise / np.maximum(np.abs(noise), 1e-12)
    return np.fft.irfft2(np.abs(np.fft.rfft2(values - values.mean())) * phases, s=values.shape)


def _pair(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The image and a copy blurred beyond recognition."""
    # A blur instead of black: a hard edge or a black area would be a feature of its own.
    radius = max(picture.shape[:2]) / 4
    return picture, np.array(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)))


def _ranks(values: np.ndarray, like: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Ranks (H, W) in [0, 1), 0 for the largest value; ties are ordered by a random map with the spectrum of `like`.

    Breaking ties by pixel noise would mix image and blur pixel by pixel, which affects a network differently from
    blobs: maps with many ties would then differ from random maps, whatever they show.
    """
    noise, ties = generator.random(values.shape), random_like(like, generator)
    ties = 1e-6 * noise - ties / max(np.abs(ties).max(), 1e-9)  # noise alone if `like` is flat
    score = (
        np.round(values.astype(np.float64), 6) + 4e-7 * ties
    )  # less than half a rounding step, so that one sort does both
    ranks = np.empty(values.size, np.float32)
    ranks[np.argsort(-score, axis=None)] = (np.arange(values.size) + 0.5) / values.size
    return ranks.reshape(values.shape)


def _areas(network: Network, x: Tensor, blurred: Tensor, ranks: list[np.ndarray]) -> Tensor:
    """The area under the deletion curve, the probability over the share of blurred pixels: (ranks, classes)."""
    # Without 0 and 1: the two ends of every curve are the image and its blurred copy, computed once.
    shares = np.arange(1, STEPS) / STEPS

    def images() -> Iterator[Tensor]:
        yield x
        yield blurred
        for rank in ranks:
            place = torch.from_numpy(rank).to(x.device)
            for share in shares:
                # Rank 0 is the most salient pixel, so that the share of the most salient ones is blurred.
                yield torch.where(place < share, blurred, x)

    probabilities = log_probabilities(network, images()).exp()
    inner = probabilities[2:].unflatten(0, (len(ranks), -1))
    # the trapezoidal rule: all curves share their ends, the image and the blurred image
    return ((probabilities[0] + probabilities[1]) / 2 + inner.sum(dim=1)) / STEPS


def _compare(deletion: Tensor, insertion: Tensor, random: Tensor) -> dict[str, Any]:
    """The scores of one map, from its areas and those of the random maps (RANDOM_MAPS,)."""
    baseline = {"mean": float(random.mean()), "std": float(random.std())}
    better = {"deletion": random > deletion + LEAST, "insertion": random < insertion - LEAST}
    worse = {"deletion": random < deletion - LEAST, "insertion": random > insertion + LEAST}
    return {
        "deletion": float(deletion),
        "insertion": float(insertion),
        "random": {"deletion": baseline, "insertion": dict(baseline)},
        "beaten": {name: float(maps.float().mean()) for name, maps in better.items()},
        "verdict": _verdict(*([name for name in found if found[name].all()] for found in (better, worse))),
    }


def _verdict(better: list[str], worse: list[str]) -> str:
    """The verdict in words, from the scores that are better, or worse, than those of all random maps."""
    if len(better) == 2:
        return "better than chance"
    if better:
        return f"better than chance by {better[0]} only"
    return "worse than chance" if len(worse) == 2 else "no better than chance"
