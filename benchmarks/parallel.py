"""Parallel branches at batch 1, plain, fused one by one and fused side by side: the cases of docs/results/parallel.md.

    python benchmarks/parallel.py [--rounds 31] [--json FILE] [--page docs/results/parallel.md] [--compare FILE]

All networks and forms are timed in the same rounds, so that each can be compared with each. They are as many
attentions and FFNs of the same width; the first network has them all in sequence.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import patchloom
import script
from patchloom.benching.timing import interleaved, ratio
from patchloom.kernels import native
from patchloom.models.network import Network

MODELS = ("vit_small_36x1", "vit_small_18x2", "vit_small_12x3")
PLAIN, FUSED, APART, BESIDE = "plain", "fused", "fused, branch by branch", "fused, side by side"
TRIAL = 5  # rounds; with fewer the page says that its figures are no results


def forms(name: str, size: int) -> dict[str, Network]:
    """The network in its forms; one without parallel branches has a single fused one."""
    plain = patchloom.create_model(name, img_size=size).eval()
    if len(plain.blocks[0].mixing.branches) == 1:
        return {PLAIN: plain, FUSED: patchloom.fuse(plain)}
    return {PLAIN: plain, APART: patchloom.fuse(plain, side_by_side=False), BESIDE: patchloom.fuse(plain)}


def pairs(names: Sequence[str]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """What is compared with what, each a network and its form: the forms of a network, then the networks."""
    first, *parallel = names
    of_one = [((first, FUSED), (first, PLAIN))]
    for name in parallel:
        of_one += [((name, APART), (name, PLAIN)), ((name, BESIDE), (name, PLAIN)), ((name, BESIDE), (name, APART))]
    across = [((name, PLAIN), (first, PLAIN)) for name in parallel]
    across += [((name, form), (first, FUSED)) for form in (APART, BESIDE) for name in parallel]
    return of_one + across


@torch.inference_mode()
def measure(names: Sequence[str] = MODELS, size: int = 224, rounds: int = 31) -> list[dict[str, Any]]:
    images = torch.randn(1, 3, size, size)
    networks = {(name, form): network for name in names for form, network in forms(name, size).items()}
    labels = {case: ": ".join(case) for case in networks}
    times = interleaved({labels[case]: partial(network, images) for case, network in networks.items()}, rounds)
    return [row(times, labels[ours], labels[peer], size) for ours, peer in pairs(names)]


def row(times: Mapping[str, list[float]], ours: str, peer: str, size: int) -> dict[str, Any]:
    middle, low, high = ratio(times, peer, ours)
    ours_ms, peer_ms = (statistics.median(times[who]) * 1e3 for who in (ours, peer))
    print(f"{ours:40} {ours_ms:6.1f} ms  beside {peer:40} {peer_ms:6.1f} ms  {middle:.2f} ({low:.2f} - {high:.2f})")
    about = {"model": ours, "peer": peer, "batch": 1, "size": size, "ours_ms": ours_ms, "peer_ms": peer_ms}
    return {**about, "ratio": middle, "low": low, "high": high}


PAGE = """# Parallel branches at batch 1

`{command}` measures the models at {size} pixels, batch 1, float32, {threads} threads, in {rounds} interleaved round(s).
Times are medians; speed-ups are medians of the ratios of the rounds. {date}, {cores} cores ({instructions}), torch {torch}, {kernels}.
{trial}
All three models have 36 attention branches and 36 FFNs of the same width, so they have the same parameters and the same arithmetic.
*Side by side* means that [`fuse`](../speed.md) merges the parallel branches of a residual into one: one matrix product for all their queries, keys and values,
one attention with the heads of all, and one product for each layer of the FFNs. `fuse(model, side_by_side=False)` computes them *branch by branch*.

## Plain and fused forms of each model

{of_one}

## Compared with sequential branches

{across}

With the C++ kernels, `{first}` and the *side by side* forms compute all blocks except the last in one call, with one Strassen step per
matrix product. The *branch by branch* form does neither. Its rows in the second table therefore show more than the effect of the order of the branches.
"""  # noqa: E501
WARNING = "\n**A trial of the script with too few rounds: these numbers are not results.**\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| model and form | ms | compared with | ms | speed-up | quartiles of the rounds |"]
    lines += ["| :-- | --: | :-- | --: | --: | :-- |"]
    for row in rows:
        figures = f"{row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f}"
        lines += [f"| {row['model']} | {row['ours_ms']:.1f} | {row['peer']} | {row['peer_ms']:.1f} | {figures} |"]
    return "\n".join(lines)


def page(rows: Sequence[Mapping[str, Any]], rounds: int) -> str:
    def of_one(row: Mapping[str, Any]) -> bool:
        return row["model"].split(":")[0] == row["peer"].split(":")[0]

    return PAGE.format(
        command=shlex.join(["python", *sys.argv]),
        size=rows[0]["size"],
        threads=torch.get_num_threads(),
        rounds=rounds,
        date=time.strftime("%Y-%m-%d"),
        cores=torch.multiprocessing.cpu_count(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        kernels="C++ kernels" if native.available() else "without the C++ kernels",
        trial=WARNING if rounds < TRIAL else "",
        of_one=table([row for row in rows if of_one(row)]),
        across=table([row for row in rows if not of_one(row)]),
        first=rows[0]["model"].split(":")[0],
    )


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows = measure(rounds=options.rounds)
    if options.page:
        options.page.write_text(page(rows, options.rounds))
    yield from rows


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=31)
    parser.add_argument("--page", type=Path, help="write the tables here, docs/results/parallel.md")
    script.run(parser.parse_args(), measured)
