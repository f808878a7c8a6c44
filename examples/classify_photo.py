"""Run a photo from scikit-learn through a model with random weights, to show preprocessing and the forward pass."""

from __future__ import annotations

from pathlib import Path

import sklearn
import torch

import patchloom
from patchloom.data.images import prepare, read_image


def main() -> None:
    photo = Path(sklearn.__file__).parent / "datasets" / "images" / "flower.jpg"
    torch.manual_seed(0)
    model = patchloom.create_model("cait_xxs24").eval()
    with torch.inference_mode():
        probabilities = model(prepare(read_image(photo), model.preprocessing)).softmax(dim=-1)[0]
    best = probabilities.topk(3)
    print(f"\n{photo.name} through {model.config.name}, {patchloom.complexity(model).params / 1e6:.1f}M parameters:")
    for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(f"  class {index:4d}  {probability:.2%}")
    print(
        "These weights are random, so the predicted classes are meaningless. Load trained weights with patchloom.load."
    )


if __name__ == "__main__":
    main()
