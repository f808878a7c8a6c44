"""What a step of MAE costs at several mask ratios: `python benchmarks/mae_cost.py [--rounds 5] [--batch 8]`.

Forward and backward of deit_small at 224 pixels with a decoder of 2 blocks of width 192, on one thread. The masked
patches are left out of the encoder, so a larger mask costs less.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

import patchloom
import script
from patchloom.benching.timing import interleaved
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.mae import Mae
from patchloom.tasks.pretraining.method import Setup
from patchloom.tasks.pretraining.patches import patch_order

RATIOS = (0.2, 0.5, 0.75, 0.9)


def make_method(mask_ratio: float, size: int) -> Mae:
    """MAE with random weights."""
    trunk = patchloom.create_model("deit_small", head="none", img_size=size)
    recipe = find_recipe("mae").replace(mask_ratio=mask_ratio, decoder_depth=2, decoder_dim=192, decoder_heads=3)
    config = PretrainingConfig("random images", labels=None, model=trunk.config)
    method = Mae(Setup(config, recipe, trunk, steps_per_epoch=1, steps=1))
    method.modules.train()
    return method


def step(method: Mae, batch: dict[str, torch.Tensor]) -> None:
    method.modules.zero_grad()
    method.losses(batch, 0, 0)["pixels"].mean().backward()


def measured(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    images = torch.randint(0, 256, (options.batch, options.size, options.size, 3), dtype=torch.uint8)
    patches = (options.size // 16) ** 2
    order = torch.stack([torch.from_numpy(patch_order(patches, seed)) for seed in range(options.batch)])
    batch = {"image": images, "order": order}
    calls = {str(ratio): partial(step, make_method(ratio, options.size), batch) for ratio in RATIOS}
    times = interleaved(calls, options.rounds)
    first = statistics.median(times[str(RATIOS[0])])
    for ratio in RATIOS:
        seconds = statistics.median(times[str(ratio)])
        print(f"mask_ratio {ratio:<5} {seconds:.2f} s per step, {seconds / first:.2f} of mask_ratio {RATIOS[0]}")
        yield {"model": f"mae {ratio}", "batch": options.batch, "seconds": seconds, "relative": seconds / first}


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    script.run(parser.parse_args(), measured)
