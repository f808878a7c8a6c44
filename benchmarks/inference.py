"""Inference beside timm's eager networks and PatchConvNet's published form: the cases of docs/results/inference.md.

    python benchmarks/inference.py [--models NAME ...] [--rounds 15] [--compiled] [--roofline PNG] [--json FILE]
        [--compare FILE]

`patchloom bench` measures one network in the same way. `--compiled` sets ours beside timm through torch.compile as
well, which takes minutes to compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import patchloom
import script
from patchloom.benching.charts import draw_roofline
from patchloom.benching.inference import measure
from patchloom.benching.peers import pair
from patchloom.benching.timing import copy_rate, gemm_rate, interleaved, ratio


class Case(NamedTuple):
    model: str
    size: int = 224
    batch: int = 8
    against: str = "timm"


CASES = [
    Case("cait_xxs24"),
    Case("cait_s24"),
    Case("cait_xxs24", 384, 4),
    Case("cait_s24", 384, 4),
    Case("deit_tiny"),
    Case("deit_small"),
    Case("deit3_small"),
    Case("resmlp_s12"),
    Case("patchconvnet_s60", against="published"),
]
COMPILED = ("cait_xxs24", "cait_s24")


@torch.inference_mode()
def beside_compiled(name: str, rounds: int, batch: int = 8, size: int = 224) -> dict[str, Any]:
    """Ours against timm's through torch.compile."""
    torch.manual_seed(0)
    plain, theirs = pair(name, "timm", size)
    assert theirs is not None
    images = torch.randn(batch, 3, size, size)
    compiled, ours = torch.compile(theirs), patchloom.fuse(plain)
    times = interleaved({"theirs": partial(compiled, images), "ours": partial(ours, images)}, rounds)
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        sys.exit("torch.compile ran eagerly: nothing was compared")
    middle, low, high = ratio(times, "theirs", "ours")
    about = {"model": name, "peer": "timm, compiled", "batch": batch, "size": size}
    return {**about, "ratio": middle, "low": low, "high": high}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows = []
    for case in CASES:
        if case.model in options.models:
            how = {"batch": options.batch or case.batch, "size": case.size, "rounds": options.rounds}
            how["memory"] = not options.no_memory
            rows.append(shown(script.in_a_fresh_process(measure, case.model, case.against, **how)))
            yield rows[-1]
    if options.roofline:
        draw_roofline(rows, gemm_rate(), copy_rate(), options.roofline)
    for name in COMPILED if options.compiled else ():
        yield shown(script.in_a_fresh_process(beside_compiled, name, options.rounds))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    line = f"{row['model']:17} {row['size']} px, batch {row['batch']}, against {row['peer']:14} {row['ratio']:.2f} "
    line += f"({row['low']:.2f} - {row['high']:.2f})"
    if "ours" in row:
        ours, theirs = row["ours"], row["theirs"]
        line += f"  one image {row['latency_ratio']:.2f}  share {theirs['share']:.0%} -> {ours['share']:.0%}"
        if ours["memory_mb"] is not None:
            line += f"  memory {ours['memory_mb'] / max(theirs['memory_mb'], 1e-9):.0%}"
        line += f"  difference {row['difference']:.0e}"
    print(line, flush=True)
    return row


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=15)
    known = sorted({case.model for case in CASES})
    parser.add_argument("--models", nargs="*", default=known, choices=known)
    parser.add_argument("--batch", type=int, help="instead of the case's own")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--roofline", type=Path, help="a picture of what limits each network")
    script.run(parser.parse_args(), measured)
