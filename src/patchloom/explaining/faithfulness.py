"""Whether a map means anything: does the class go when the pixels it marks go, and come when they come?

Deletion blurs pixels away, the most salient first; insertion begins with a blurred image and brings them back in that
order (Petsiuk et al.). The area under the curve of the class's probability is small for a good deletion and large for
a good insertion. Both are set against random maps with the same power spectrum, so of the same smoothness.
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

RANDOM_MAPS = 16  # one that beats them all would do so by luck one time in 17
STEPS = 6  # from nothing to everything
LEAST = 1e-6  # by which areas differ


def faithfulness(
    network: Network, picture: np.ndarray, maps: Mapping[str, np.ndarray], targets: Mapping[str, int], seed: int = 0
) -> dict[str, dict[str, Any]]:
    """By map: deletion and insertion (areas), random (their mean and std over random maps), beaten (the share of random
    maps that are worse by either), verdict.

    `picture` is the crop that the network sees, (H, W, 3) uint8; maps are (H, W), `targets` the class that each is
    about. Of a random map the deletion area counts for insertion as well: deleting by r is inserting by -r read
    backwards, and r and -r are as likely.
    """
    x, blurred = (network_input(network, one)[0] for one in _pair(picture))
    generator = np.random.default_rng(seed)
    ranks = []
    for values in maps.values():
        order = _ranks(values, values, generator)
        ranks += [order, 1 - order]  # deletion, insertion backwards
        ranks += [_ranks(random_like(values, generator), values, generator) for _ in range(RANDOM_MAPS)]
    areas = _areas(network, x, blurred, ranks).unflatten(0, (len(maps), -1))
    return {name: _compare(*areas[i, :, targets[name]].split((1, 1, RANDOM_MAPS))) for i, name in enumerate(maps)}


def random_like(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A random map with the power spectrum of `values`, (H, W): the same amplitudes, phases of white noise."""
    noise = np.fft.rfft2(generator.standard_normal(values.shape))
    phases = noise / np.maximum(np.abs(noise), 1e-12)
    return np.fft.irfft2(np.abs(np.fft.rfft2(values - values.mean())) * phases, s=values.shape)


def _pair(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The picture, and one blurred beyond recognition."""
    radius = max(picture.shape[:2]) / 4
    return picture, np.array(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)))


def _ranks(values: np.ndarray, like: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """(H, W) in [0, 1): 0 for the largest value; ties in the order of a random map like `like`.

    Ties in the order of pixel noise would mix picture and blur pixel by pixel, which changes the class of a network
    otherwise than blobs do: then maps with many ties would differ from random maps, whatever they mark.
    """
    noise, ties = generator.random(values.shape), random_like(like, generator)
    ties = 1e-6 * noise - ties / max(np.abs(ties).max(), 1e-9)  # noise alone if `like` is flat
    score = np.round(values.astype(np.float64), 6) + 4e-7 * ties  # less than half a step: one sort, not two
    ranks = np.empty(values.size, np.float32)
    ranks[np.argsort(-score, axis=None)] = (np.arange(values.size) + 0.5) / values.size
    return ranks.reshape(values.shape)


def _areas(network: Network, x: Tensor, blurred: Tensor, ranks: list[np.ndarray]) -> Tensor:
    """(ranks, classes): the area under the deletion curve, a class's probability over the share of blurred pixels."""
    shares = np.arange(1, STEPS) / STEPS

    def images() -> Iterator[Tensor]:
        yield x
        yield blurred
        for rank in ranks:
            place = torch.from_numpy(rank).to(x.device)
            for share in shares:
                yield torch.where(place < share, blurred, x)

    chances = log_probabilities(network, images()).exp()
    inner = chances[2:].unflatten(0, (len(ranks), -1))
    return ((chances[0] + chances[1]) / 2 + inner.sum(dim=1)) / STEPS


def _compare(deletion: Tensor, insertion: Tensor, random: Tensor) -> dict[str, Any]:
    chance = {"mean": float(random.mean()), "std": float(random.std())}
    better = {"deletion": random > deletion + LEAST, "insertion": random < insertion - LEAST}
    worse = {"deletion": random < deletion - LEAST, "insertion": random > insertion + LEAST}
    return {
        "deletion": float(deletion),
        "insertion": float(insertion),
        "random": {"deletion": chance, "insertion": dict(chance)},
        "beaten": {name: float(maps.float().mean()) for name, maps in better.items()},
        "verdict": _verdict(*([name for name in found if found[name].all()] for found in (better, worse))),
    }


def _verdict(better: list[str], worse: list[str]) -> str:
    """In words, from the measures by which the map beats all random maps, and those by which all beat it."""
    if len(better) == 2:
        return "better than chance"
    if better:
        return f"better than chance by {better[0]} only"
    return "worse than chance" if len(worse) == 2 else "no better than chance"
