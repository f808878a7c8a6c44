"""Ask a trained run about one digit that it has not seen: python examples/classify_digit.py RUN"""

from __future__ import annotations

import sys
from pathlib import Path

import patchloom
from patchloom.data.sources import open_source


def main(run: Path) -> None:
    digits = open_source("digits")
    item = digits.splits["val"][0]
    picture = run / "digit.png"
    digits.read(item).save(picture)
    row = patchloom.predict(run, picture, top=3)[0]
    said = ", ".join(f"{entry['class']} ({entry['probability']:.1%})" for entry in row["predictions"])
    print(f"{picture}: {said}; its label is {digits.class_names[item.label]}")
    print(f"Open {run / 'report.html'} in a browser: curves, confusion, the surest mistakes.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
