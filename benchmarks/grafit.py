"""Grafit beside its baselines on small real data: search by fine labels after training on coarse ones.

    python benchmarks/grafit.py DATA VIT [--cases ...] [--seeds 3] [--out DIR] [--json FILE]
        [--page docs/results/grafit.md] [--kept-only]

DATA is a folder with pets128.tar, cifar100_part.tar and cifar10_jpeg.tar; VIT is a file with the weights of ViT-Ti
(augreg). Four networks are trained on coarse labels: two from scratch (animal or vehicle, on CIFAR-10), two from VIT
(cat or dog, on the pets; 20 superclasses, on CIFAR-100). Each has the rows of Table 2.7: cross-entropy, SNCA+, Grafit
FC, Grafit, with several seeds. The last of them is trained three times as long too, with one seed. Fine labels are used
in the evaluation alone: kNN accuracy, and mAP without condition, under the predicted coarse class and under the true
one. Before training and after it, clusters of the vectors inside every coarse class are compared with the fine classes
(`search split`).

Everything is on one thread. Runs and their measurements are kept in DIR and not made again; a run that was interrupted
is resumed. All cases with one seed come first, so that an interrupted benchmark has a page of whole rows.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import patchloom
import script
from grafit_page import METHODS, page
from patchloom.console import Console
from patchloom.runs.launch import resume
from patchloom.search.evaluation import CONDITIONS, evaluate_search
from patchloom.search.splitting import split_index
from patchloom.training.run import Run, write_text

VIT_MEAN = (0.5, 0.5, 0.5)  # and standard deviation, of the weights' training
ANIMALS = {"bird", "cat", "deer", "dog", "frog", "horse"}
QUIET = Console(quiet=True)
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Case:
    """Data with two levels, and the network that is trained on the coarse one."""

    title: str
    data: str  # a name in DATA
    coarse: str
    fine: str
    model: str  # "vit": the trained weights
    epochs: int
    size: int
    settings: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    most_seeds: int = 100

    @property
    def trained(self) -> bool:
        return self.model == "vit"

    def describe(self, collection: int, queries: int, epochs: int) -> str:
        """The case in a sentence."""
        start = "from trained weights" if self.trained else "from random weights"
        name = "ViT-Ti" if self.trained else f"`{self.model}`"
        return (
            f"{name} {start} at {self.size} pixels, {epochs} epochs on the column `{self.coarse}` of {collection:,} "
            f"images; {queries:,} queries by `{self.fine}`."
        )


CIFAR10, CIFAR100 = "CIFAR-10, animal or vehicle", "CIFAR-100, 20 superclasses"
CASES = {
    "cifar10-nano": Case(f"{CIFAR10}, nano network", "cifar10", "coarse", "fine", "patchconvnet_nano", 6, 32),
    "cifar10-resnet18": Case(f"{CIFAR10}, ResNet-18", "cifar10", "coarse", "fine", "timm:resnet18", 4, 32),
    "pets-vit": Case("Pets, cat or dog, ViT-Ti", "pets", "species", "breed", "vit", 4, 112),
    "cifar100-vit": Case(f"{CIFAR100}, ViT-Ti", "cifar100", "coarse", "fine", "vit", 3, 96),
    "cifar100-vit-long": Case(
        f"{CIFAR100}, ViT-Ti, three times as long", "cifar100", "coarse", "fine", "vit", 9, 96, most_seeds=1
    ),
}
SPLIT = "pets-vit"  # the case whose coarse classes are split
VIEWS = 2
PER_BREED = 15  # training photos of each breed


# Data


def manifest(case: Case, options: argparse.Namespace) -> Path:
    """The CSV file of a case's images, whose archive is unpacked first."""
    archive, rows_of = DATA[case.data]
    folder: Path = options.out / "data" / case.data
    file = folder / "images.csv"
    if not file.exists():
        with tarfile.open(options.data / archive) as tar:
            tar.extractall(folder, filter="data")
        rows = rows_of(folder)
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        write_text(file, "\n".join(lines) + "\n")
    return file


def cifar10(folder: Path) -> Rows:
    """All images, with animal or vehicle above the ten classes."""
    files = [path for split in ("train", "test") for path in sorted(folder.glob(f"cifar10_jpeg/{split}/*/*.jpg"))]
    return [
        {
            "path": path.relative_to(folder).as_posix(),
            "fine": path.parent.name,
            "coarse": "animal" if path.parent.name in ANIMALS else "vehicle",
            "split": path.parts[-3],
        }
        for path in files
    ]


def cifar100(folder: Path) -> Rows:
    return listed(folder / "cifar100" / "cifar100.csv", "cifar100", ("fine", "coarse", "split"))


def pets(folder: Path) -> Rows:
    """The first photos of each breed for training, all that are held out."""
    seen: dict[str, int] = {}
    kept = []
    for row in listed(folder / "pets128" / "pets128.csv", "pets128", ("breed", "species", "split")):
        if row["split"] == "train":
            seen[row["breed"]] = seen.get(row["breed"], 0) + 1
        if row["split"] != "train" or seen[row["breed"]] <= PER_BREED:
            kept.append(row)
    return kept


def listed(file: Path, folder: str, columns: Sequence[str]) -> Rows:
    with open(file, newline="") as handle:
        return [
            {"path": f"{folder}/{row['path']}", **{name: row[name] for name in columns}}
            for row in csv.DictReader(handle)
        ]


DATA: dict[str, tuple[str, Callable[[Path], Rows]]] = {
    "cifar10": ("cifar10_jpeg.tar", cifar10),
    "cifar100": ("cifar100_part.tar", cifar100),
    "pets": ("pets128.tar", pets),
}


# Training and measuring


def trained(name: str, method: str, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a run that is at its end, from its last checkpoint if it has one."""
    case, folder = CASES[name], options.out / "runs" / f"{name}-{method}-{seed}"
    if (folder / "report.html").exists():
        return folder
    if (folder / "recipe.yaml").exists():
        resume(folder, QUIET)
        return folder
    start: dict[str, Any] = {"model": case.model, "model_options": case.model_options}
    if case.trained:
        start = {"model": options.weights, "model_options": {"heads": 3}, "mean": VIT_MEAN, "std": VIT_MEAN}
    views = {"views": VIEWS} if "inst" in METHODS[method].losses else {}
    patchloom.grafit(
        manifest(case, options), labels=case.coarse, recipe=f"{method}@small", out=folder, resolution=case.size,
        epochs=options.epochs or case.epochs, seed=seed, console=QUIET, workers=0, eval_every="1000 epochs",
        **start, **views, **case.settings,
    )  # fmt: skip
    return folder


def untrained(case: Case, options: argparse.Namespace) -> Any:
    """The network that the runs from trained weights start from."""
    network: Any = patchloom.load(options.weights, img_size=case.size, heads=3)
    network.preprocessing = dataclasses.replace(network.preprocessing, mean=VIT_MEAN, std=VIT_MEAN, crop_ratio=1.0)
    return network


def scores(network: Any, case: Case, data: Path, conditions: Sequence[str] = CONDITIONS) -> dict[str, Any]:
    """kNN accuracy on both levels, and mAP on the fine one under each condition."""
    found: dict[str, Any] = {}
    for condition in conditions:
        asked = [case.fine, case.coarse] if condition == "none" else [case.fine]
        levels = evaluate_search(network, data, asked, condition=condition, coarse=case.coarse)["levels"]
        fine = levels[case.fine]
        found[f"map_{condition}"] = fine["map"]
        if condition == "none":
            found |= {key: fine[key] for key in ("knn", "k", "queries", "collection")}
            found["knn_coarse"] = levels[case.coarse]["knn"]
    return found


def measured_run(name: str, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    begun = time.process_time()
    folder = trained(name, method, seed, options)
    seconds = time.process_time() - begun
    case = CASES[name]
    found = scores(folder, case, manifest(case, options))
    run = Run.open(folder)
    last = run.records()[-1]
    return {
        "part": "search", "model": name, "method": method, "seed": seed, "epochs": options.epochs or case.epochs,
        "seconds": seconds, "losses": last.get("losses", {}), **found,
    }  # fmt: skip


def frozen(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The measurements before training."""
    case = CASES[name]
    found = scores(untrained(case, options), case, manifest(case, options))
    return {"part": "search", "model": name, "method": "frozen", "seed": 0, "epochs": 0, **found}


def clusters(name: str, method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Clusters of the training images' vectors beside the fine classes, their number chosen or given."""
    case = CASES[name]
    data = manifest(case, options)
    network = untrained(case, options) if method == "frozen" else trained(name, method, 0, options)
    folder = options.out / "indexes" / f"{name}-{method}"
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted before its rows were kept
    index = patchloom.Index.build(network, data, folder, labels=[case.coarse, case.fine], split="train")
    rows = []
    for number in (None, *options.clusters):
        _, found = split_index(index, case.coarse, clusters=number, truth=case.fine)
        each = {key: one["clusters"] for key, one in found["classes"].items()}
        rows.append({
            "part": "clusters", "model": name, "method": method, "clusters": number, "each": each,
            "ari": found["ari"], "purity": found["purity"],
        })  # fmt: skip
    return rows


# All


def kept(file: Path, measure: Callable[[], Any]) -> Any:
    """A measurement of an earlier call, or measured and written."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = measure()
        for row in found if isinstance(found, list) else [found]:
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        write_text(file, json.dumps(found, indent=1) + "\n")
    return json.loads(file.read_text())


def steps(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every measurement: the name of its file, and how to make it."""
    pretrained = [name for name in options.cases if CASES[name].trained]
    for name in pretrained:
        yield f"{name}-frozen", lambda name=name: frozen(name, options)
    for seed in range(options.seeds):
        for name in (name for name in options.cases if seed < CASES[name].most_seeds):
            for method in METHODS:
                yield (
                    f"{name}-{method}-{seed}",
                    lambda name=name, method=method, seed=seed: measured_run(name, method, seed, options),
                )
        if seed == 0 and SPLIT in options.cases:
            for method in ("frozen", "snca_plus", "grafit"):
                yield f"clusters-{SPLIT}-{method}", lambda method=method: clusters(SPLIT, method, options)


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, measure in steps(options):
        file = options.out / "measured" / f"{name}.json"
        if options.kept_only and not file.exists():
            continue
        found = kept(file, measure)
        rows += found if isinstance(found, list) else [found]
        if options.page:
            options.page.write_text(page(rows, CASES, options.seeds))
    return rows


def make_parser() -> argparse.ArgumentParser:
    parser = script.parser(__doc__ or "", rounds=1, threads=1)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("weights", type=Path, metavar="VIT")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of every run, in place of those of the case")
    parser.add_argument("--clusters", type=int, nargs="*", default=[12, 25], help="numbers of clusters beside auto")
    parser.add_argument("--out", type=Path, default=Path(".cache/grafit"), help="keep runs and measurements here")
    parser.add_argument("--kept-only", action="store_true", help="measure nothing: a page of what is kept")
    parser.add_argument("--page", type=Path, help="write the tables here, docs/results/grafit.md")
    return parser


if __name__ == "__main__":
    script.run(make_parser().parse_args(), measured)
