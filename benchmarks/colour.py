"""CaiT and DeiT with their @small recipes on colour photos, beside timm's training of the same networks.

    python benchmarks/colour.py DATA [--models cait_nano deit_nano] [--minutes 15] [--out DIR] [--results docs/results]

DATA has the class folders train/ and test/ (or val/). Both sides of a model begin at the same moment, each in a process
with one thread on a core of its own, and train for as many whole epochs as fit into the same minutes at the speed that
a short run of both has measured. timm's side is all timm's: network class, data set and loader, Mixup, optimizer,
schedule and loss, with the values of our recipe. Only the recipe's small affine moves have no place there: timm turns
and shifts photos within its policies alone, which @small does not use. Pairs that are finished in DIR are not run
again, so the benchmark can be cut and go on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

import patchloom
from patchloom.compat import import_timm
from patchloom.console import Console
from patchloom.data.opening import open_source
from patchloom.data.splits import split_source
from patchloom.models.registry import build
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.spec import RunConfig

RECIPES = {"cait_nano": "cait@small", "deit_nano": "deit@small"}
SIDES = ("patchloom", "timm")
SAMPLE = 512  # training images of the run that measures the speed, about
SAMPLE_EPOCHS = 3  # of that run; the first is its warm-up
BATCH = 64  # as the small rule has it
FIXED: dict[str, Any] = {"batch_size": BATCH, "resolution": 32, "seed": 0, "workers": 0}  # workers would share the core


def train_ours(data: Path, model: str, epochs: int, out: Path) -> list[dict[str, Any]]:
    """The records of our run, one an epoch."""
    quiet = Console(quiet=True)
    run = patchloom.train(data, model=model, recipe=RECIPES[model], out=out, console=quiet, epochs=epochs, **FIXED)
    return [row for row in run.records() if row["event"] == "epoch"]


def train_timm(data: Path, model: str, epochs: int, _: Path) -> list[dict[str, Any]]:
    """The like records of timm's parts with the values of our recipe."""
    timm = import_timm()
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    run = plan_training(data, model, RECIPES[model], {"epochs": epochs, **FIXED}, {})
    recipe = run.recipe
    timm.utils.random_seed(recipe.seed)
    loader, held_out = timm_loaders(data, run)
    classes, steps = len(loader.dataset.reader.class_to_idx), len(loader)
    network = timm_network(run, classes)
    mix = timm.data.Mixup(
        recipe.mixup, recipe.cutmix, None, recipe.mix_probability, recipe.switch_probability,
        label_smoothing=recipe.label_smoothing, num_classes=classes,
    )  # fmt: skip
    loss_of = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(
        network, recipe.optimizer, recipe.lr, recipe.weight_decay, betas=recipe.betas, eps=recipe.eps
    )
    warmup: dict[str, Any] = {"warmup_t": round(recipe.warmup_epochs * steps), "warmup_lr_init": recipe.warmup_lr}
    schedule = CosineLRScheduler(optimizer, epochs * steps, recipe.min_lr, t_in_epochs=False, **warmup)
    records = []
    for epoch in range(1, epochs + 1):
        network.train()
        for step, (images, labels) in enumerate(loader, (epoch - 1) * steps + 1):
            x, targets = mix(images, labels)
            loss = loss_of(network(x), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step_update(step)
        top1 = timm_top1(network, held_out)
        records.append({"step": step, "top1": top1, "time": time.time()})
    return records


def timm_network(run: RunConfig, classes: int) -> torch.nn.Module:
    """timm's class with the hyper-parameters of our config, started in timm's way."""
    from timm.models.cait import Cait
    from timm.models.vision_transformer import VisionTransformer

    config: Any = run.task.network_config(run.recipe, classes)
    same = {name: getattr(config, name) for name in ("patch_size", "num_classes", "depth", "mlp_ratio")}
    same |= {"embed_dim": config.dim, "num_heads": config.heads, "drop_path_rate": config.drop_path}
    network: torch.nn.Module
    if config.family == "cait":
        own = {"init_values": config.scale_value, "depth_token_only": config.class_depth}
        network = Cait(img_size=config.img_size[0], **same, **own)
    else:
        network = VisionTransformer(img_size=config.img_size, **same)
    counts = [sum(p.numel() for p in net.parameters()) for net in (network, build(config))]
    assert counts[0] == counts[1], f"timm's {config.name} has {counts[0]} parameters, ours {counts[1]}"
    return network


def timm_loaders(data: Path, run: RunConfig) -> tuple[Any, Any]:
    """timm's loaders of the two splits that our side takes."""
    from timm.data import create_dataset, create_loader

    recipe, split = run.recipe, split_source(open_source(data))
    preprocessing = build(run.task.model).preprocessing
    names = ("val", "valid", "validation", "test")
    folders = data / "train", next(data / name for name in names if (data / name).is_dir())
    sets = [create_dataset("", root=str(folder)) for folder in folders]
    assert [len(images) for images in sets] == [len(split.train), len(split.held_out)]
    common: dict[str, Any] = {"batch_size": BATCH, "num_workers": recipe.workers, "device": torch.device("cpu")}
    common |= {"interpolation": recipe.interpolation, "mean": preprocessing.mean, "std": preprocessing.std}
    common["input_size"] = (3, recipe.resolution, recipe.resolution)
    augment: dict[str, Any] = {"scale": (recipe.crop_scale, 1.0), "hflip": recipe.flip, "color_jitter": None}
    training = create_loader(sets[0], is_training=True, **augment, **common)
    return training, create_loader(sets[1], crop_pct=recipe.test_crop_ratio, **common)


@torch.inference_mode()
def timm_top1(network: torch.nn.Module, loader: Any) -> float:
    network.eval()
    right = sum(int((network(images).argmax(dim=1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def run_side(side: str, core: int | None, start: Any, data: Path, model: str, epochs: int, folder: Path) -> None:
    """What a child process does: wait for the other side, train, write SIDE.json."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    import_timm()  # on both sides before the clock
    start.wait(timeout=300)
    begun, worked = time.time(), time.process_time()
    train = train_ours if side == "patchloom" else train_timm
    records = train(data, model, epochs, folder / "run")
    seconds = time.time() - begun
    tops = [row["top1"] for row in records]
    told = {"model": model, "side": side, "epochs": epochs, "last_top1": tops[-1], "best_top1": max(tops)}
    told |= {"seconds": round(seconds, 2), "cpu_seconds": round(time.process_time() - worked, 2)}
    told["images_per_second"] = round(records[-1]["step"] * BATCH / seconds, 1)
    told["curve"] = [[round(row["time"] - begun, 2), round(row["top1"], 4)] for row in records]  # seconds, top-1
    (folder / f"{side}.json").write_text(json.dumps(told) + "\n")


def run_pair(data: Path, model: str, epochs: dict[str, int], folder: Path) -> list[dict[str, Any]]:
    """What both sides tell, begun at the same moment; read where both are finished."""
    files = [folder / f"{side}.json" for side in SIDES]
    if not all(file.exists() for file in files):
        shutil.rmtree(folder, ignore_errors=True)  # half a pair did not share its machine
        folder.mkdir(parents=True)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else [None]
        spawn = multiprocessing.get_context("spawn")
        start = spawn.Barrier(len(SIDES))
        children = []
        for i, side in enumerate(SIDES):
            told = (side, cores[i % len(cores)], start, data, model, epochs[side], folder)
            children.append(spawn.Process(target=run_side, args=told, daemon=True))  # it ends with this process
            children[-1].start()
        while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
            time.sleep(0.5)
        if any(child.exitcode for child in children):
            sys.exit(f"{model}: a side failed, see above")
    return [json.loads(file.read_text()) for file in files]


def epochs_that_fit(data: Path, model: str, minutes: float, folder: Path) -> dict[str, int]:
    """Whole epochs of each side in the minutes, by a short run of both on every k-th image of each class."""
    k = max(1, _images(data) // SAMPLE)
    sample = folder / "sample"
    for place in (path for path in data.glob("*/*") if path.is_dir()):
        there = sample / place.relative_to(data)
        there.mkdir(parents=True, exist_ok=True)
        for image in sorted(place.iterdir())[::k]:
            link = there / image.name
            if not link.exists():
                link.symlink_to(image)
    told = run_pair(sample, model, dict.fromkeys(SIDES, SAMPLE_EPOCHS), folder / "speed")
    steps = [_images(folder) // BATCH for folder in (data, sample)]  # of an epoch
    seconds = {row["side"]: (row["curve"][-1][0] - row["curve"][0][0]) / (SAMPLE_EPOCHS - 1) for row in told}
    return {side: max(1, int(minutes * 60 / (seconds[side] * steps[0] / steps[1]))) for side in SIDES}


def _images(data: Path) -> int:
    return len(split_source(open_source(data)).train)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Top-1 against minutes, one panel a model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "colour", "font.size": 9})
    figure, panels = plt.subplots(
        1, len(models), figsize=(3.8 * len(models), 3), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        for row, colour in zip((r for r in rows if r["model"] == model), ("#3f51b5", "#e07b39"), strict=True):
            minutes, tops = zip(*((seconds / 60, 100 * top) for seconds, top in row["curve"]), strict=True)
            panel.plot(minutes, tops, color=colour, marker="o", markersize=2, linewidth=1.2, label=row["side"])
        panel.set(title=model, xlabel="minutes", xlim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("top-1, %")
    panels[0][0].legend(loc="best")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | side | epochs | seconds | images/s | last top-1 | best top-1 |",
        "| :-- | :--" + " | --:" * 5 + " |",
    ]
    for row in rows:
        speed, tops = row["images_per_second"], f"{row['last_top1']:.1%} | {row['best_top1']:.1%}"
        lines.append(
            f"| `{row['model']}` | {row['side']} | {row['epochs']} | {row['seconds']:.0f} | {speed:.0f} | {tops} |"
        )
    return "\n".join(lines)


PAGE = """# Colour photos, compared with timm

`{command}` trained each model twice on {data}
({train} training and {held_out} held-out photos, {classes} classes) at 32 pixels: with the `@small` recipe of its
family, and with timm's own components. {date}, a machine with {cores} cores ({capability}), torch {torch},
timm {timm}, float32, seed 0.

{table}

![Top-1 against minutes](colour.svg)

How the time is measured:

- Both runs of a model start at the same moment. Each is a process with one thread on its own core, without loader processes.
- A short run of both first measures the time of an epoch, without counting the first epoch. Each side then trains for as many whole epochs as fit into
  {minutes:g} minutes, and its learning-rate schedule spans exactly these epochs.
- Nothing is stopped early. The seconds count from opening the data to the end, with an evaluation after every epoch. Images/s are the training images processed in these
  seconds.

The same on both sides: the shape of the model (the parameter counts are equal), the batch size of {batch}, AdamW and its
values, warm-up and cosine schedule per update, cross-entropy with label smoothing and Mixup, stochastic depth, crop, flip and
normalisation.

Different:

- timm rotates and shifts photos only in policies such as RandAugment, which `@small` does not use. Its photos are cropped and flipped; patchloom's
  also get small affine transforms.
- Each library uses its own weight initialisation.
- patchloom uses torch's fused AdamW, timm the default one.
- patchloom's seconds include a check of every image, a checkpoint per epoch, the export and the report. timm's side has none of these.

This is one seed and {held_out} photos. The standard error of a top-1 is about {error:.1f} points. The best of many epochs is
biased upwards, so compare the last. `colour.json` has the curves and the CPU time of each side (`cpu_seconds`). If that is much less than
its seconds, another process was using the machine.
"""  # noqa: E501


def write_results(rows: list[dict[str, Any]], data: Path, minutes: float, folder: Path) -> None:
    """colour.json, colour.svg and colour.md."""
    source = open_source(data)
    split, p = split_source(source), sum(row["last_top1"] for row in rows) / len(rows)
    about = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "minutes": minutes}
    about |= {"data": data.name, "train": len(split.train), "held_out": len(split.held_out)}
    about |= {"classes": len(source.class_names), "torch": torch.__version__, "timm": import_timm().__version__}
    about |= {"cores": os.cpu_count(), "capability": torch.backends.cpu.get_cpu_capability()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "colour.json").write_text(json.dumps({**about, "rows": rows}) + "\n")
    draw(rows, folder / "colour.svg")
    error = 100 * math.sqrt(p * (1 - p) / len(split.held_out))
    (folder / "colour.md").write_text(PAGE.format(**about, batch=BATCH, table=table(rows), error=error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--out", type=Path, default=Path(".cache/colour"))
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that they end too
    data, rows = options.data.resolve(), []
    for model in options.models:
        folder = options.out.resolve() / f"{data.name}-{model}-{options.minutes:g}min"
        epochs = epochs_that_fit(data, model, options.minutes, folder)
        print(f"{model}: {', '.join(f'{side} {count} epochs' for side, count in epochs.items())}", flush=True)
        rows += run_pair(data, model, epochs, folder / "full")
    print(table(rows))
    write_results(rows, data, options.minutes, options.results)


if __name__ == "__main__":
    main()
