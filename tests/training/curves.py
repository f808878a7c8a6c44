"""Golden loss curves: twelve steps of every family and every kind of run, with all digits.

    OMP_NUM_THREADS=1 python tests/training/curves.py        records tests/reference/curves again

The training set has 40 images, fewer than a batch: an epoch is a step, and log.jsonl holds the loss of every step.
The curves are equal to the bit where processor and library versions are those that they were recorded with.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.datasets import load_digits

import patchloom
from patchloom.console import Console

FOLDER = Path(__file__).parents[1] / "reference" / "curves"
STEPS = 12
COMMON = {"epochs": STEPS, "batch_size": 64, "workers": 0, "resolution": 16, "warmup_epochs": 2, "seed": 3}
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "patchloom"]


def case(model: str, recipe: str, kind: str = "train", options: dict[str, Any] | None = None, **changes: Any) -> dict:
    """A run: `kind` is train, distill, finetune or two (processes)."""
    given = {"kind": kind, "model": model, "recipe": recipe, "options": {"depth": 2, **(options or {})}}
    return {**given, "changes": {**COMMON, **changes}}


MIXED = {"mixup": 0.8, "cutmix": 1.0, "drop_path": 0.2, "repeated_augmentation": 3, "erasing": 0.25}
CASES = {
    "deit": case("deit_nano", "deit@small"),
    "deit3": case("deit3_nano", "deit3_1k@small"),
    "cait": case("cait_nano", "cait@small"),
    "resmlp": case("resmlp_nano", "resmlp@small"),
    "patchconvnet": case("patchconvnet_nano", "patchconvnet@small", options={"scale_value": 0.1}),
    "vit_parallel": case("vit_tiny_2x2", "vit_a2_ls@small", options={"patch_size": 4, "dim": 48, "heads": 3}),
    "ema_accumulate": case("deit_nano", "deit@small", ema=0.9, accumulate=2, clip_grad=1.0),
    "mixing": case("cait_nano", "cait@small", augmentation="rand", crop_scale=0.3, **MIXED),
    "bce_three_augment": case(
        "deit3_nano", "deit3_1k@small", augmentation="three", crop="src", color_jitter=0.3, **MIXED
    ),
    "batchnorm": case("patchconvnet_nano", "patchconvnet@small", options={"norm": "batch", "scale_value": 1.0}),
    "lamb": case("cait_nano", "cait@small", optimizer="lamb", lr=5e-3, clip_grad=1.0),
    "sgd": case("deit_nano", "old_fashioned@small", lr=0.05),
    "distill_token": case("deit_nano", "deit@small", "distill"),
    "distill_hard": case("cait_nano", "cait@small", "distill", how="hard"),
    "distill_soft": case("resmlp_nano", "resmlp@small", "distill", how="soft"),
    "finetune_head": case("deit_nano", "new_classes", "finetune", head_lr=5e-3, lr=1e-4),
    "finetune_attention": case("deit_nano", "deit_finetune@small", "finetune", tune="attention", lr=1e-3),
    "two_processes": case("deit_nano", "deit@small", "two", ema=0.9, drop_path=0.1),
    "two_processes_sharded": case("deit_nano", "deit@small", "two", shard="full"),
    "two_processes_batchnorm": case(
        "patchconvnet_nano", "patchconvnet@small", "two", {"norm": "batch", "scale_value": 1.0}
    ),
}


def machine() -> dict[str, str]:
    """What float rounding depends on: the processor's make and instructions, and the libraries."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    processor = hashlib.sha256("\n".join(found.get(key, "") for key in keys).encode()).hexdigest()[:16]
    return {"processor": processor, **{name: version(name) for name in ("torch", "numpy", "pillow", "timm")}}


def digits(folder: Path) -> Path:
    """40 real handwritten digits to train on and 20 held out, as PNG files in four class folders."""
    table = load_digits()
    for label in range(4):
        images = table.images[table.target == label]
        for split, chosen in (("train", images[:10]), ("val", images[10:15])):
            (folder / split / f"digit {label}").mkdir(parents=True)
            for i, image in enumerate(chosen):
                Image.fromarray((image * 15).astype("uint8")).resize((20, 18)).convert("RGB").save(
                    folder / split / f"digit {label}" / f"{i}.png"
                )
    return folder


def curve(name: str, work: Path) -> dict[str, list[float]]:
    """Train a case; the values of every step."""
    given, data, out = CASES[name], digits(work / "digits"), work / "run"
    kind, changes, options = given["kind"], dict(given["changes"]), given["options"]
    quiet = {"console": Console(quiet=True)}
    if kind == "two":
        words = [f"{key}={value}" for key, value in changes.items()] + [
            f"model.{key}={value}" for key, value in options.items()
        ]
        command = [
            "train",
            str(data),
            "--model",
            given["model"],
            "--recipe",
            given["recipe"],
            "--out",
            str(out),
            *words,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *TWO, *command], check=True, capture_output=True, env=environment, timeout=300)
    elif kind == "train":
        patchloom.train(
            data, model=given["model"], recipe=given["recipe"], out=out, model_options=options, **changes, **quiet
        )
    else:
        base = patchloom.train(
            data,
            model=given["model"],
            recipe="deit@small",
            out=work / "base",
            model_options=options,
            **{**COMMON, "epochs": 2},
            **quiet,
        )
        if kind == "distill":
            patchloom.distill(
                base.folder,
                data,
                model=given["model"],
                recipe=given["recipe"],
                out=out,
                model_options=options,
                **changes,
                **quiet,
            )
        else:
            patchloom.finetune(base.folder, data, recipe=given["recipe"], out=out, **changes, **quiet)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    names = ("train_loss", "loss", "ema_loss")
    return {name: [row[name] for row in rows if name in row] for name in names if any(name in row for row in rows)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as work:
            found = curve(name, Path(work))
        (FOLDER / f"{name}.json").write_text(json.dumps({"made_with": machine(), **found}, indent=1) + "\n")
        print(f"{name}: {found['train_loss'][0]:.4f} to {found['train_loss'][-1]:.4f}")
