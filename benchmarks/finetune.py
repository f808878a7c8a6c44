"""What is worth tuning: all, attention, FFN or head alone, beside a linear probe: accuracy, speed, memory, storage.

    python benchmarks/finetune.py WEIGHTS DATA [--mean 0.5 --std 0.5] [--resolution 128] [--finish 224] [--epochs 5]
        [--seeds 3] [--cost-resolution 384] [--out .cache/finetune] [--json FILE] -- [key=value ...]

Accuracy: mean and spread over seeds on the held-out images, after the same epochs; "low, then 224" goes on from the
fully tuned network at the higher resolution. Speed: whole steps (forward, backward, update) of all four in one process,
interleaved, medians, as a ratio to full fine-tuning. Memory: peak of a process of its own above what it takes before
the first step (Linux). Runs that are already in DIR are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import patchloom
from patchloom.benching.inference import megabytes
from patchloom.console import Console
from patchloom.inference.probes import probe
from patchloom.recipes.changes import parse_words
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.classification.losses import cross_entropy
from patchloom.tasks.classification.start import freeze
from patchloom.training.optimizers import make_optimizer

TUNINGS = ("all", "attention", "ffn", "head")


class Trainer:
    """One way of tuning, on noise: what a step costs does not depend on the pictures."""

    def __init__(self, weights: str, hints: dict[str, Any], tune: str, size: int, batch: int) -> None:
        self.network = patchloom.load(weights, img_size=size, num_classes=37, **hints).train()
        freeze(self.network, tune)
        self.optimizer = make_optimizer(self.network, find_recipe("new_classes"))
        self.x, self.y = torch.randn(batch, 3, size, size), torch.eye(37)[torch.arange(batch) % 37]

    def step(self) -> float:
        begun = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.network(self.x), self.y).mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun


def speeds(weights: str, hints: dict[str, Any], size: int, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step, by tuning, interleaved."""
    trainers = {tune: Trainer(weights, hints, tune, size, batch) for tune in TUNINGS}
    seconds: dict[str, list[float]] = {tune: [] for tune in TUNINGS}
    for _ in range(rounds + 1):
        for tune, trainer in trainers.items():
            seconds[tune].append(trainer.step())
    return {tune: statistics.median(values[1:]) for tune, values in seconds.items()}


def memory(weights: str, hints: dict[str, Any], tune: str, size: int, batch: int) -> float:
    """Megabytes that two steps add to a fresh process."""
    trainer = Trainer(weights, hints, tune, size, batch)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = megabytes("VmRSS")
    trainer.step(), trainer.step()
    return megabytes("VmHWM") - before


def accuracy(
    options: argparse.Namespace, tune: str, seed: int, changes: dict[str, Any], hints: dict[str, Any]
) -> float:
    out = options.out / f"{tune}-{seed}"
    if not (out / "report.html").exists():
        patchloom.finetune(
            options.weights, options.data, out=out, tune=tune, resolution=options.resolution, seed=seed,
            epochs=options.epochs, delta=tune != "all", model_options=hints, console=Console(quiet=True),
            **normalisation(options), **changes,
        )  # fmt: skip
    return json.loads((out / "export" / "model.json").read_text())["held_out"]["top1"]


def normalisation(options: argparse.Namespace) -> dict[str, Any]:
    """What a bare file of weights does not say of itself."""
    return {name: (getattr(options, name),) * 3 for name in ("mean", "std") if getattr(options, name) is not None}


def finished(options: argparse.Namespace, seed: int, changes: dict[str, Any]) -> float:
    """Full fine-tuning at the low resolution, then a short one at the high."""
    out = options.out / f"finish-{seed}"
    if not (out / "report.html").exists():
        patchloom.finetune(
            options.out / f"all-{seed}", options.data, out=out, resolution=options.finish, seed=seed,
            recipe="new_classes", epochs=1, console=Console(quiet=True), **{**changes, "lr": 2e-5, "head_lr": 2e-5},
        )  # fmt: skip
    return json.loads((out / "export" / "model.json").read_text())["held_out"]["top1"]


def storage(options: argparse.Namespace, tune: str) -> float:
    name = "model" if tune == "all" else "delta"
    return (options.out / f"{tune}-0" / "export" / f"{name}.safetensors").stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--finish", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cost-resolution", type=int, default=384)
    parser.add_argument("--cost-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(".cache/finetune"))
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    changes, hints = parse_words((word for word in words if word != "--"), ClassificationOptions)
    seconds = speeds(options.weights, hints, options.cost_resolution, options.cost_batch, options.rounds)
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for tune in TUNINGS:
        with spawn.Pool(1) as pool:
            args = (options.weights, hints, tune, options.cost_resolution, options.cost_batch)
            megabytes = pool.apply(memory, args)
        tops = [accuracy(options, tune, seed, changes, hints) for seed in range(options.seeds)]
        rows.append(
            {"tune": tune, "top1": tops, "seconds": seconds[tune], "mb": megabytes, "stored": storage(options, tune)}
        )
        show(rows[-1], rows[0])
    tops = [finished(options, seed, changes) for seed in range(options.seeds)]
    rows.append({"tune": f"all, then {options.finish}", "top1": tops})
    rows.append({"tune": "linear probe", "top1": [probe_of(options, hints)]})
    for row in rows[-2:]:
        show(row, rows[0])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def probe_of(options: argparse.Namespace, hints: dict[str, Any]) -> float:
    network = patchloom.load(options.weights, img_size=options.resolution, **hints)
    network.preprocessing = replace(network.preprocessing, **normalisation(options))
    return probe(network, options.data, "linear", crop_ratio=1.0)["top1"]  # as new_classes tests


def show(row: dict[str, Any], full: dict[str, Any]) -> None:
    spread = statistics.stdev(row["top1"]) if len(row["top1"]) > 1 else 0.0
    line = f"{row['tune']:16} {statistics.mean(row['top1']):.2%} ± {spread:.2%}"
    if "seconds" in row:
        line += (
            f"  speed {full['seconds'] / row['seconds']:.2f}  memory {row['mb'] / full['mb']:.0%} ({row['mb']:.0f} MB)"
            f"  stored {row['stored']:.1f} MB"
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
