"""Inference speed beside timm's eager models and two published forms of PatchConvNet, in one interleaved run.

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

PEERS = {  # ours -> timm's; None: the published forms of our own network
    "cait_xxs24": "cait_xxs24_224",
    "cait_s24": "cait_s24_224",
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit3_small": "deit3_small_patch16_224",
    "resmlp_s12": "resmlp_12_224",
    "patchconvnet_s60": None,
}
NOISE_BAND = 0.07


def published_form(model: nn.Module, channels_first: bool) -> nn.Module:
    """The same weights with a permute on either side of every block, and a separate scale and addition.

    channels_first  each block works on a channels-first copy, as its published description has it; else on the view
                    that a permute gives, as the authors' code does, with the stem's strides kept in the residual stream
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ConvBranch | Stem):
            module.forward = module.plain
        if isinstance(module, ConvBranch) and channels_first:
            module.forward = lambda x, plain=module.plain: plain(_channels_first(x))
        if isinstance(module, LayerScale):
            module.forward = lambda total, y, scale=module: total + scale.of(y)
    return model


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """The same map (B, height, width, D), laid out so that its permute to (B, D, height, width) is contiguous."""
    return x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def pairs(name: str) -> tuple[nn.Module, dict[str, nn.Module]]:
    """(ours, peers by name), with equal weights."""
    theirs = PEERS[name]
    if theirs is None:
        ours = patchloom.create_model(name).eval()
        return ours, {
            "channels-first": published_form(ours, channels_first=True),
            "authors' views": published_form(ours, channels_first=False),
        }
    import timm

    peer = timm.create_model(theirs).eval()
    with torch.no_grad():  # timm starts some heads and scales at or near zero, which would hide errors
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return patchloom.load(peer.state_dict()), {f"timm {timm.__version__}": peer}


@torch.inference_mode()
def measure(
    name: str, peer_name: str, peer: nn.Module, ours: nn.Module, batch: int, rounds: int, peak: float
) -> dict[str, float | str]:
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
        ours, peers = pairs(name)
        for peer_name, peer in peers.items():
            row = measure(name, peer_name, peer, ours, options.batch, options.rounds, peak)
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
    before = {(row["model"], row["peer"]): row["ratio"] for row in recorded}
    slower = [
        f"{row['model']}: {row['ratio']:.2f}, recorded {before[key]:.2f}"
        for row in rows
        if (key := (row["model"], row["peer"])) in before and row["ratio"] < before[key] * (1 - NOISE_BAND)
    ]
    if slower:
        sys.exit("slower than recorded by more than the noise band: " + "; ".join(slower))


if __name__ == "__main__":
    main()
