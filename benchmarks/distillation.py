"""Students of none, soft, hard and token distillation, several seeds, the same budget.

    python benchmarks/distillation.py TEACHER DATA [--models deit_nano cait_nano] [--seeds 3] [--epochs 12]
        [--resolution 32] [--out .cache/distillation] [--json FILE] -- [key=value ...]

TEACHER is anything that `patchloom distill` takes. Prints mean and spread of the last epoch's top-1 on the held-out
images. What the teacher says is kept in DIR, so that each draw of an image is shown to it once. Runs that are already
in DIR are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import patchloom
from patchloom.console import Console
from patchloom.recipes.changes import parse_words
from patchloom.recipes.options import ClassificationOptions

METHODS = ("none", "soft", "hard", "token")


def student(options: argparse.Namespace, model: str, method: str, seed: int, words: list[str]) -> dict[str, float]:
    """The last record of one run, and its seconds."""
    out = options.out / f"{model}-{method}-{seed}"
    begun = time.perf_counter()
    if not (out / "report.html").exists():
        changes, shape = parse_words(words, ClassificationOptions)
        common: dict[str, Any] = {
            "model": model, "recipe": f"{model.split('_')[0]}@small", "out": out, "model_options": shape, "seed": seed,
            "epochs": options.epochs, "resolution": options.resolution, "console": Console(quiet=True), **changes,
        }  # fmt: skip
        if method == "none":
            patchloom.train(options.data, **common)
        else:
            cache = {"cache": str(options.out / "teacher")}
            patchloom.distill(options.teacher, options.data, method=method, distillation=cache, **common)
    told = json.loads((out / "export" / "model.json").read_text())
    return {"top1": told["held_out"]["top1"], "seconds": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("--models", nargs="*", default=["deit_nano", "cait_nano"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(".cache/distillation"))
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    rows = []
    for model in options.models:
        for method in METHODS:
            runs = [student(options, model, method, seed, words) for seed in range(options.seeds)]
            tops = [run["top1"] for run in runs]
            spread = statistics.stdev(tops) if len(tops) > 1 else 0.0
            rows.append({"model": model, "method": method, "top1": tops})
            each = ", ".join(f"{top:.1%}" for top in tops)
            print(f"{model:12} {method:6} {statistics.mean(tops):.2%} ± {spread:.2%}  ({each})", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
