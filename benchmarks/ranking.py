"""Exact mAP over whole rankings, beside faiss with numpy and pytorch-metric-learning's AccuracyCalculator.

    python benchmarks/ranking.py [--queries 10000] [--items 50000] [--dim 256] [--classes 1000] [--peer-queries 1000]
                                 [--threads 2] [--rounds 1] [--json FILE] [--compare FILE]

Each contender is measured in a process of its own: seconds for all queries, and the peak of its memory.
Peers get blocks of queries that fit into memory, and `--peer-queries` of them alone where all would take an hour; their
time is then scaled. mAP of the same queries must be equal to 1e-6: faiss and the calculator compute in float32.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import script
from patchloom.benching.inference import megabytes
from patchloom.inference.neighbours import normalise
from patchloom.inference.ranking import Level, rank

BLOCK = 250  # queries that a peer ranks at a time: 50,000 items with their places and scores take 150 MB
PEERS = {"faiss + numpy": "faiss", "AccuracyCalculator": "pytorch_metric_learning"}


def data(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Unit vectors of queries and items around the centres of their classes, and the classes."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(options.classes, options.dim, generator=generator)
    labels = [torch.randint(options.classes, (n,), generator=generator) for n in (options.queries, options.items)]
    z, x = (normalise(centres[one] + 2 * torch.randn(len(one), options.dim, generator=generator)) for one in labels)
    return z, x, labels[0].numpy(), labels[1].numpy()


def ours(z: torch.Tensor, x: torch.Tensor, truth: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return rank(z, x, {"label": Level(truth, labels)})[0]["label"]


def faiss_numpy(z: torch.Tensor, x: torch.Tensor, truth: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The whole ranking by faiss, average precision from the places of the relevant items."""
    faiss = importlib.import_module("faiss")
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(x.numpy())
    found = []
    for start in range(0, len(z), BLOCK):
        _, places = index.search(z[start : start + BLOCK].numpy(), len(x))
        relevant = labels[places] == truth[start : start + BLOCK, None]
        precision = relevant.cumsum(axis=1) / np.arange(1, len(x) + 1)
        found.append((precision * relevant).sum(axis=1) / np.maximum(1, relevant.sum(axis=1)))
    return np.concatenate(found)


def calculator(z: torch.Tensor, x: torch.Tensor, truth: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean of each block, repeated: the calculator gives no values per query."""
    importlib.import_module("patchloom.compat")
    module = importlib.import_module("pytorch_metric_learning.utils.accuracy_calculator")
    neighbours = importlib.import_module("pytorch_metric_learning.utils.inference")
    distances = importlib.import_module("pytorch_metric_learning.distances")
    measure = module.AccuracyCalculator(
        include=("mean_average_precision",),
        k=len(x),
        knn_func=neighbours.CustomKNN(distances.CosineSimilarity(), batch_size=BLOCK),
        device=torch.device("cpu"),
    )
    known, found = torch.from_numpy(labels), []
    for start in range(0, len(z), BLOCK):
        part = torch.from_numpy(truth[start : start + BLOCK])
        score = measure.get_accuracy(z[start : start + BLOCK], part, x, known)["mean_average_precision"]
        found.append(np.full(len(part), score))
    return np.concatenate(found)


CONTENDERS = {"patchloom": ours, "faiss + numpy": faiss_numpy, "AccuracyCalculator": calculator}


def once(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds for all queries, gigabytes at the peak, and the mAP of the queries that every contender ranks."""
    z, x, truth, labels = data(options)
    count = len(z) if name == "patchloom" else min(len(z), options.peer_queries)
    start = time.perf_counter()
    found = CONTENDERS[name](z[:count], x, truth[:count], labels)
    seconds = (time.perf_counter() - start) * len(z) / count
    shared = min(len(z), options.peer_queries)
    return {
        "seconds": seconds,
        "gigabytes": megabytes("VmHWM") / 1000,
        "map": float(found[:shared].mean()),
        "measured": count,
    }


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print(
        f"{options.queries} queries x {options.items} items x {options.dim} dimensions, {options.classes} classes; "
        f"peers rank {min(options.queries, options.peer_queries)} queries"
    )
    names = [name for name in CONTENDERS if name == "patchloom" or find_spec(PEERS[name]) is not None]
    for name in set(CONTENDERS) - set(names):
        print(f"{name}: {PEERS[name]} is not installed")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            results[name].append(script.in_a_fresh_process(once, name, options))
    own = results["patchloom"]
    print(f"{'':20} {'seconds':>8} {'GB':>6} {'ratio':>6}  mAP")
    for name, rows in results.items():
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(rows, own, strict=True))
        row = {
            "model": "mAP", "peer": name, "ratio": ratio,
            **{key: statistics.median(one[key] for one in rows) for key in ("seconds", "gigabytes", "map", "measured")},
        }  # fmt: skip
        print(f"{name:20} {row['seconds']:8.2f} {row['gigabytes']:6.2f} {ratio:6.2f}  {row['map']:.6f}")
        if abs(row["map"] - own[0]["map"]) > 1e-6:
            print(f"  mAP differs from patchloom's {own[0]['map']:.8f} by {abs(row['map'] - own[0]['map']):.1e}")
        yield row


def make_parser() -> argparse.ArgumentParser:
    parser = script.parser(__doc__ or "", rounds=1)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--peer-queries", type=int, default=1000)
    return parser


if __name__ == "__main__":
    script.run(make_parser().parse_args(), measured)
