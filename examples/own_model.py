"""Train a module of your own on handwritten digits: python examples/own_model.py --out RUN"""

import argparse

import torch
from torch import nn

import patchloom


def network() -> nn.Module:
    """A small convolutional network for 16 x 16 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 16, 10),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="RUN")
    options = parser.parse_args()
    patchloom.train(
        "digits", model=network(), recipe="deit@small", out=options.out,
        resolution=16, epochs=3, lr=3e-3, flip=0.0, workers=0,
    )  # fmt: skip
