"""Pre-training without labels on small real images: DINO, BeiT and MAE, then few labels; speed beside lightly.

    python benchmarks/pretraining.py DATA [--parts dino beit mae speed pictures] [--seeds 3] [--out DIR] [--json FILE]
        [--page docs/results/pretraining.md] [--pictures docs/images] [--kept-only]

DATA is a folder with coco128.tar, and for pictures pets128.tar. The images are 32-pixel crops of ten COCO photos, and
the class is the photo (`pretraining_data.py`). Everything is on one thread.

- dino: ViT and ResMLP; kNN before and after, and of pixels; fine-tuned with some labels, and trained from scratch.
- beit: linear, convolutional and hMLP stems with one tokenizer per seed; likewise.
- mae: ViT with 5 and 20 labels per class, several draws of labels.
- speed: steps of DINO and MAE beside lightly's modules, if it is installed. Run it on an idle machine.
- pictures: MAE on photos of pets at 64 pixels; part of its report as a PNG file.

Runs and their measurements are kept in DIR and not made again; a run that was interrupted is resumed. All parts with
one seed come first. Processes with other parts may share DIR; a last call finds everything kept and writes the page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import patchloom
import pretraining_data as data
import script
from patchloom.console import Console
from patchloom.data.images import as_image, to_batch
from patchloom.inference.items import open_items
from patchloom.inference.neighbours import knn_probabilities, normalise
from patchloom.runs.launch import resume
from patchloom.temporary import write_json
from patchloom.training.run import Run
from pretraining_page import page
from pretraining_pictures import save_reconstructions
from pretraining_speed import speed_rows

QUIET = Console(quiet=True)
TRAIN, VAL = 200, 100  # crops of each photo
NEIGHBOURS, TEMPERATURE = 20, 0.07  # as the probes of a run have them
_NEVER = "100000 epochs"


@dataclass(frozen=True)
class Case:
    """A network that is pre-trained, then fine-tuned with labels."""

    method: str
    model: str
    epochs: int
    finetune: str  # recipe of the fine-tuning
    scratch: str  # recipe of the training from scratch, with as many epochs
    options: Mapping[str, Any] = field(default_factory=dict)  # of the network
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the pre-training
    labels: Mapping[int, int] = field(default_factory=lambda: {20: 1})  # per class: draws for each seed


VIT = {"patch_size": 8, "depth": 3}
RESMLP = {"patch_size": 8, "depth": 4}
STEMS = ("linear", "conv", "hmlp")
CASES: dict[str, dict[str, Case]] = {
    "dino": {
        "vit": Case("dino", "deit_nano", 16, "new_classes", "deit@small", VIT),
        "resmlp": Case("dino", "resmlp_nano", 16, "new_classes", "resmlp@small", RESMLP),
    },
    "beit": {
        stem: Case("beit", "deit_nano", 20, "beit_finetune@small", "deit@small", VIT, {"stem": stem}) for stem in STEMS
    },
    "mae": {
        "vit": Case("mae", "deit_nano", 40, "mae_finetune@small", "deit@small", VIT, labels={5: 3, 20: 2}),
    },
}
FINETUNING = {5: (60, 16), 20: (30, 32)}  # labels per class: epochs and batch size
PARTS = (*CASES, "speed", "pictures")
PICTURED, PICTURE_EPOCHS, PICTURE_SIZE = "pictures-mae", 24, 64


class Bench:
    """The options, and what is kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out

    @property
    def crops(self) -> Path:
        counts = (TRAIN, VAL) if self.options.crops is None else self.options.crops
        return data.crops(self.options.data / "coco128.tar", self.out / "data" / "crops", *counts)

    def epochs(self, epochs: int) -> int:
        return self.options.epochs or epochs

    def run(self, name: str, start: Callable[[Path], Any]) -> Path:
        """The folder of a run that is at its end, from its last checkpoint if it has one."""
        folder = self.out / "runs" / name
        if (folder / "report.html").exists():
            return folder
        if (folder / "recipe.yaml").exists() or (folder / "stages.json").exists():
            resume(folder, QUIET)
        else:
            start(folder)
        return folder

    def pretrained(self, part: str, name: str, seed: int) -> Path:
        case = CASES[part][name]
        # One tokenizer per seed: the first stem's run trains it.
        shared = part == "beit" and name != STEMS[0]
        tokenizer = self.pretrained(part, STEMS[0], seed) if shared else None
        return self.run(
            f"{part}-{name}-{seed}",
            lambda folder: patchloom.pretrain(
                self.crops, method=case.method, model=case.model, model_options=case.options, out=folder,
                recipe=f"{case.method}@small", tokenizer=tokenizer, epochs=self.epochs(case.epochs), seed=seed,
                img_size=data.SIZE, probe_every=10**6, workers=0, console=QUIET, **case.settings,
            ),
        )  # fmt: skip

    def classifier(self, part: str, name: str, seed: int, per_class: int, draw: int, start: Path | None) -> float:
        """The accuracy of a classifier that is trained with a draw of labels: from a run, or from random weights."""
        case, (epochs, batch) = CASES[part][name], FINETUNING[per_class]
        labelled = data.draw_labels(self.crops, per_class, draw)
        settings: dict[str, Any] = {
            "epochs": self.epochs(epochs), "batch_size": batch, "seed": seed, "workers": 0, "eval_every": _NEVER,
            "console": QUIET,
        }  # fmt: skip
        origin = "scratch" if start is None else "pretrained"

        def train(folder: Path) -> Run:
            if start is not None:
                return patchloom.finetune(start, labelled, out=folder, recipe=case.finetune, **settings)
            options = {**case.options, **self.built(part, name, seed)}
            return patchloom.train(
                labelled, model=case.model, model_options=options, out=folder, recipe=case.scratch,
                resolution=data.SIZE, **settings,
            )  # fmt: skip

        folder = self.run(f"{part}-{name}-{seed}-{origin}-{per_class}-{draw}", train)
        return float(patchloom.evaluate(folder, labelled)["top1"])

    def built(self, part: str, name: str, seed: int) -> dict[str, Any]:
        """Options with which the network from scratch is the same as the pre-trained one."""
        config: Any = patchloom.load(self.pretrained(part, name, seed)).config
        names = ("aggregation", "stem") if config.family != "resmlp" else ()
        return {key: getattr(config, key) for key in names}


# Measurements


def pixels(bench: Bench) -> dict[str, Any]:
    """kNN accuracy of the pixels themselves, normalised as a network gets them."""
    source, test = open_items(bench.crops, None, None, None)
    _, train = open_items(bench.crops, None, "train", None)
    preprocessing = patchloom.create_model("deit_nano", img_size=data.SIZE).preprocessing

    def vectors(items: Iterable[Any]) -> torch.Tensor:
        return normalise(to_batch([as_image(source.read(item)) for item in items], preprocessing).flatten(1))

    labels, truth = (torch.tensor([item.label for item in items]) for items in (train, test))
    found = knn_probabilities(vectors(test), vectors(train), labels, NEIGHBOURS, TEMPERATURE, len(source.class_names))
    accuracy = (found.argmax(dim=1) == truth).float().mean()
    return {"part": "pixels", "model": "pixels", "knn": float(accuracy), "train": len(train), "test": len(test)}


def features(bench: Bench, part: str, name: str, seed: int) -> dict[str, Any]:
    """Probes before and after pre-training."""
    begun = time.process_time()
    folder = bench.pretrained(part, name, seed)
    probed = [record for record in Run.open(folder).records() if "knn" in record]
    first, last = probed[0], probed[-1]
    more = ("losses", "entropy", "std", "accuracy", "accuracy_of_most_frequent", "reconstruction")
    tokenizer = folder / "tokenizer"
    codes = Run.open(tokenizer).records()[-1] if tokenizer.exists() else {}
    return {
        "part": part, "model": name, "seed": seed, "epochs": last["epoch"], "cpu_seconds": time.process_time() - begun,
        **{f"{key}_before": first[key] for key in ("knn", "linear")},
        **{key: last[key] for key in ("knn", "linear", *more) if key in last},
        **{key: codes[key] for key in ("codes", "perplexity", "reconstruction_error") if key in codes},
    }  # fmt: skip


def labelled(bench: Bench, part: str, name: str, seed: int, per_class: int, draw: int) -> dict[str, Any]:
    """Accuracy with few labels, from the features and from scratch."""
    begun = time.process_time()
    start = bench.pretrained(part, name, seed)
    epochs, batch = FINETUNING[per_class]
    found = {
        "pretrained": bench.classifier(part, name, seed, per_class, draw, start),
        "scratch": bench.classifier(part, name, seed, per_class, draw, None),
    }
    return {
        "part": f"{part} labels", "model": name, "seed": seed, "labels": per_class, "draw": draw,
        "epochs": bench.epochs(epochs), "batch": batch, "cpu_seconds": time.process_time() - begun, **found,
    }  # fmt: skip


def pictured(bench: Bench) -> dict[str, Any]:
    """A run on photos of pets, for the pictures of its report."""
    begun = time.process_time()
    photos = data.photos(bench.options.data / "pets128.tar", bench.out / "data" / "pets")
    epochs = bench.epochs(PICTURE_EPOCHS)
    bench.run(
        PICTURED,
        lambda folder: patchloom.pretrain(
            photos, method="mae", model="deit_nano", model_options={"patch_size": 8, "depth": 4}, out=folder,
            recipe="mae@small", epochs=epochs, img_size=PICTURE_SIZE, probe_every=0, workers=0, console=QUIET,
        ),
    )  # fmt: skip
    return {"part": "pictures", "model": "mae", "epochs": epochs, "cpu_seconds": time.process_time() - begun}


# All


def steps(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every measurement: the name of its file, and how to make it."""
    parts = [part for part in CASES if part in bench.options.parts]
    if parts:
        yield "pixels", lambda: pixels(bench)
    for seed in range(bench.options.seeds):
        for part in parts:
            for name, case in CASES[part].items():
                yield f"{part}-{name}-{seed}", lambda part=part, name=name, seed=seed: features(bench, part, name, seed)
                for per_class, draws in case.labels.items():
                    for draw in range(seed * draws, (seed + 1) * draws):
                        chosen = (part, name, seed, per_class, draw)
                        yield "-".join(map(str, chosen)), lambda chosen=chosen: labelled(bench, *chosen)
    if "speed" in bench.options.parts:
        yield "speed", lambda: list(speed_rows(bench.options.rounds, bench.options.tiny))
    if "pictures" in bench.options.parts:
        yield PICTURED, lambda: pictured(bench)


def kept(file: Path, measure: Callable[[], Any]) -> list[dict[str, Any]]:
    """The rows of a measurement of an earlier call, or measured and written."""
    if not file.exists():
        found = measure()
        rows = found if isinstance(found, list) else [found]
        for row in rows:
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, rows)
    read: list[dict[str, Any]] = json.loads(file.read_text())
    return read


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(options)
    rows: list[dict[str, Any]] = []
    for name, measure in steps(bench):
        file = bench.out / "measured" / f"{name}.json"
        if options.kept_only and not file.exists():
            continue
        rows += kept(file, measure)
        if options.page:
            options.page.write_text(page(rows, planned(options)))
    if options.pictures and "pictures" in options.parts:
        save_reconstructions(bench.out / "runs" / PICTURED, options.pictures)
    return rows


def planned(options: argparse.Namespace) -> int:
    """How many pre-training runs the whole table has."""
    return options.seeds * sum(len(CASES[part]) for part in CASES)


def make_parser() -> argparse.ArgumentParser:
    parser = script.parser(__doc__ or "", rounds=9, threads=1)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of every run, in place of those of the case")
    parser.add_argument("--crops", type=int, nargs=2, metavar=("TRAIN", "VAL"), help=f"per photo: {TRAIN} {VAL}")
    parser.add_argument("--tiny", action="store_true", help="speed of tiny networks alone, to try the script")
    parser.add_argument("--out", type=Path, default=Path(".cache/pretraining"), help="keep runs and measurements here")
    parser.add_argument("--kept-only", action="store_true", help="measure nothing: a page of what is kept")
    parser.add_argument("--page", type=Path, help="write the tables here, docs/results/pretraining.md")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write the pictures here, docs/images")
    return parser


if __name__ == "__main__":
    script.run(make_parser().parse_args(), measured)
