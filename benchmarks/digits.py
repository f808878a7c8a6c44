"""Every family's nano model on scikit-learn's digits with its @small recipe, over several seeds.

    python benchmarks/digits.py [--seeds 3] [--models NAME ...] [--out DIR] [--json FILE]

Prints the mean and the spread of the top-1 accuracy on the held-out fifth, and the seconds of a run. Runs that are
already in DIR are not run again, so the benchmark can be cut and go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import patchloom
from patchloom.console import Console
from patchloom.runs.launch import resume

RECIPES = {
    "deit_nano": "deit@small",
    "deit3_nano": "deit3_1k@small",
    "cait_nano": "cait@small",
    "resmlp_nano": "resmlp@small",
    "patchconvnet_nano": "patchconvnet@small",
}


def accuracy(model: str, seed: int, folder: Path) -> tuple[float, float]:
    """The last epoch's top-1 of one run, and its seconds."""
    out, quiet = folder / f"{model}-{seed}", Console(quiet=True)
    begun = time.perf_counter()
    if (out / "recipe.yaml").exists():
        run = resume(out, quiet)
    else:
        run = patchloom.train(
            "digits", model=model, recipe=RECIPES[model], out=out, console=quiet, resolution=16, seed=seed
        )
    return run.records()[-1]["top1"], time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--out", type=Path, default=Path(".cache/digits"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        results = [accuracy(model, seed, options.out) for seed in range(options.seeds)]
        tops = [top for top, _ in results]
        spread = statistics.stdev(tops) if len(tops) > 1 else 0.0
        rows.append({"model": model, "recipe": RECIPES[model], "top1": tops, "seconds": [s for _, s in results]})
        each = ", ".join(f"{top:.2%}" for top in tops)
        print(f"{model:18} {statistics.mean(tops):.2%} ± {spread:.2%}  ({each})", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
