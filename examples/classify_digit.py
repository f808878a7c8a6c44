"""Classify a held-out digit with a trained run, and print what to try next: python examples/classify_digit.py RUN"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import patchloom
from patchloom.data.opening import open_source


def main(run: Path) -> None:
    digits = open_source("digits")
    item = digits.splits["val"][0]
    picture = run / "digit.png"
    digits.read(item).save(picture)
    row = patchloom.predict(run, picture, top=3)[0]
    predictions = ", ".join(f"{entry['class']} ({entry['probability']:.1%})" for entry in row["predictions"])
    print(f"{picture}: {predictions}; its label is {digits.class_names[item.label]}")
    print(f"Open {run / 'report.html'} in a browser: curves, confusion matrix, the most confident errors.")
    print(next_steps(run, picture))


def next_steps(run: Path, picture: Path) -> str:
    """Commands that work as written, whether or not the environment is activated."""
    patchloom_command = os.path.relpath(Path(sys.executable).with_name("patchloom"))
    return f"""
What to try next:
  {patchloom_command} predict {run} {picture}
  {patchloom_command} serve {run}        # a web page at http://127.0.0.1:8000
  {patchloom_command} finetune deit_tiny.fb_in1k PHOTOS --out runs/photos        # PHOTOS: one folder per class
After `source {os.path.relpath(Path(sys.prefix) / "bin" / "activate")}`, `patchloom` alone is enough."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
