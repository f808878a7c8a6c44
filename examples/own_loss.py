"""Train with a loss of your own, here the focal loss: python examples/own_loss.py --out RUN"""

import argparse

from torch import Tensor
from torch.nn import functional as F

import patchloom


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """-(1 - p)^gamma log p of the label (Lin et al., 2017), one value per image (B,)."""
    log_p = logits.log_softmax(dim=-1).gather(1, labels[:, None])[:, 0]
    return F.relu(1 - log_p.exp()) ** gamma * -log_p


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="RUN")
    options = parser.parse_args()
    patchloom.train(
        "digits", model="deit_nano", model_options={"depth": 2}, loss=focal_loss, recipe="deit@small",
        out=options.out, resolution=16, epochs=2, flip=0.0, workers=0,
    )  # fmt: skip
