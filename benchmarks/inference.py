"""Inference speed beside timm's eager models and PatchConvNet's published form, in one interleaved run.

    python benchmarks/inference.py [--models NAME ...] [--batch 8] [--rounds 15] [--json FILE] [--compare FILE]

`--compare` fails when a ratio is below the recorded one by more than the noise band.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

import patchloom
import patchloom.compat
from patchloom.layers.mixing import ConvBranch
from patchloom.layers.scales import LayerScale
from patchloom.layers.stems import Stem
from timing import gemm_rate, interleaved, ratio

PEERS = {  # ours -> timm's; None: the published form of our own network
    "cait_xxs24": "cait_xxs24_224",
    "cait_s24": "cait_s24_224",
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit3_small": "deit3_small_patch16_224",
    "resmlp_s12": "resmlp_12_224",
    "patchconvnet_s60": None,
}
NOISE_BAND = 0.07


def published_form(model: nn.Module) -> nn.Module:
    """The same weights with channels-first blocks, a permute on either side, and a separate scale and addition."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ConvBranch | Stem):
            module.forward = module.plain
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.contiguous_format)
        if isinstance(module, LayerScale):
            module.forward = lambda total, y, scale=module: total + scale.of(y)
    return model


def pair(name: str) -> tuple[nn.Module, nn.Module, str]:
    """(peer, ours, the peer's name), with equal weights."""
    theirs = PEERS[name]
    if theirs is None:
        ours = patchloom.create_model(name).eval()
        return published_form(ours), ours, "published form"
    import timm

    peer = timm.create_model(theirs).eval()
    with torch.no_grad():
        for (
            parameter
        ) in peer.parameters():  # timm starts some heads and scales at or near zero, which would hide errors
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return peer, patchloom.load(peer.state_dict()), f"timm {timm.__version__}"


@torch.inference_mode()
def measure(name: str, batch: int, rounds: int, peak: float) -> dict[str, float | str]:
    peer, ours, peer_name = pair(name)
    x = torch.randn(batch, 3, 224, 224)
    want, got = peer(x), ours(x)
    times = interleaved({"peer": lambda: peer(x), "ours": lambda: ours(x)}, rounds)
    middle, low, high = ratio(times, "peer", "ours")
    work = patchloom.complexity(ours).macs * batch
    medians = {who: statistics.median(seconds) for who, seconds in times.items()}
    return {
        "model": name,
        "peer": peer_name,
        "peer_ms": medians["peer"] * 1e3,
        "ours_ms": medians["ours"] * 1e3,
        "ratio": middle,
        "low": low,
        "high": high,
        "peer_share": work / medians["peer"] / peak,
        "ours_share": work / medians["ours"] / peak,
        "difference": float((want - got).abs().max() / want.abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--compare", type=Path, help="figures kept earlier")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peak = gemm_rate()
    allocator = {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")} or "default"
    print(
        f"torch {torch.__version__}, {options.threads} threads ({torch.backends.cpu.get_cpu_capability()}), batch "
        f"{options.batch}, 224 pixels, float32, {options.rounds} interleaved rounds, allocator {allocator}; "
        f"GEMM 2048 at {peak / 1e9:.0f} GMAC/s"
    )
    columns = f"{'model':18} {'peer':16} {'peer ms':>8} {'ours ms':>8} {'speed-up':>8}"
    print(f"{columns}  {'quartiles':11} {'share of GEMM':>13}  difference")
    rows = []
    for name in options.models:
        row = measure(name, options.batch, options.rounds, peak)
        rows.append(row)
        print(
            f"{name:18} {row['peer']:16} {row['peer_ms']:8.1f} {row['ours_ms']:8.1f} {row['ratio']:8.2f}  "
            f"{row['low']:.2f} - {row['high']:.2f} {row['peer_share']:5.0%} -> {row['ours_share']:4.0%}  "
            f"{row['difference']:.1e}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.compare:
        compare(rows, json.loads(options.compare.read_text()))


def compare(rows: list[dict], recorded: list[dict]) -> None:
    before = {row["model"]: row["ratio"] for row in recorded}
    slower = [
        f"{row['model']}: {row['ratio']:.2f}, recorded {before[row['model']]:.2f}"
        for row in rows
        if row["model"] in before and row["ratio"] < before[row["model"]] * (1 - NOISE_BAND)
    ]
    if slower:
        sys.exit("slower than recorded by more than the noise band: " + "; ".join(slower))


if __name__ == "__main__":
    main()
