"""Accuracy, loss and calibration of a classifier: every image counts once, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.images import to_input
from patchloom.data.loader import eval_batches
from patchloom.data.sources import Item, Source
from patchloom.devices import device_of, pins_memory, to_device
from patchloom.errors import PatchloomError, check_choice
from patchloom.inference.intervals import wilson_interval
from patchloom.models.class_names import names_or_indices
from patchloom.models.network import evaluation_mode
from patchloom.models.preprocessing import Preprocessing
from patchloom.text import count
from patchloom.training.processes import Processes
from patchloom.training.task import Metric

TOP1 = Metric("top1", percent=True)
BINS = 15  # of the calibration error
HEADS = ("class", "distill", "both")
FUSIONS = ("logits", "softmax")


@dataclass(frozen=True)
class Scores:
    """The predictions of a classifier, one per image, in the order of the images."""

    labels: np.ndarray  # (N,)
    predicted: np.ndarray  # (N,)
    confidence: np.ndarray  # (N,), the probability of `predicted`
    rank: np.ndarray  # (N,), how many classes are rated above the label
    loss: np.ndarray  # (N,), cross-entropy
    class_names: tuple[str, ...]
    keys: tuple[str, ...]  # the names of the images
    weights: str | None = None  # "raw" or "averaged", of a model that comes from a run

    def metrics(self) -> dict[str, Any]:
        """top1 with its 95 % interval, top5 and loss, as fractions and a mean, and the number of images."""
        return {
            "count": len(self.labels),
            "loss": float(self.loss.mean()),
            "top1": float((self.rank == 0).mean()),
            "top1_interval": list(wilson_interval(int((self.rank == 0).sum()), len(self.rank))),
            "top5": float((self.rank < 5).mean()),
        }

    def summary(self) -> dict[str, Any]:
        """`metrics` with the calibration error (ece) and the top-1 and number of images of every class that occurs."""
        return {
            **self.metrics(),
            **({} if self.weights is None else {"weights": self.weights}),
            "ece": calibration_error(self.confidence, self.predicted == self.labels),
            "per_class": {
                name: {"count": int(here.sum()), "top1": float((self.rank[here] == 0).mean())}
                for i, name in enumerate(self.class_names)
                if (here := self.labels == i).any()
            },
        }

    def confusion(self) -> np.ndarray:
        """(classes, classes): rows are labels, columns predictions."""
        table = np.zeros((len(self.class_names),) * 2, dtype=int)
        # Unlike table[i, j] += 1, add.at counts repeated pairs of indices.
        np.add.at(table, (self.labels, self.predicted), 1)
        return table


def interval_text(metrics: Mapping[str, Any]) -> str:
    """top-1 for people: "93.33 % (95 % interval 84.1 % to 97.4 %) of 60 images". In the log of a run that averages its
    weights, that of the averaged ones, which are the result."""
    kind = "ema_" if "ema_top1_interval" in metrics else ""
    low, high = metrics[f"{kind}top1_interval"]
    images = count(metrics["count"], "image")
    return f"{metrics[f'{kind}top1']:.2%} (95 % interval {low:.1%} to {high:.1%}) of {images}"


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Expected calibration error: |accuracy - confidence|, averaged over 15 bins of confidence by their share."""
    confidence = np.nan_to_num(confidence)  # the output of a damaged network can be NaN
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [
        abs(float(correct[here].mean()) - float(confidence[here].mean())) * float(here.mean())
        for i in range(BINS)
        if (here := bins == i).any()
    ]
    return float(sum(gaps))


@torch.no_grad()  # not inference_mode: a sharded network keeps what its first forward pass gathers, and trains with it
def score(
    network: Any,
    source: Source,
    items: Sequence[Item],
    preprocessing: Preprocessing,
    *,
    batch: int = 128,
    workers: int = 0,
    processes: Processes | None = None,
    after_batch: Callable[[], None] = lambda: None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Scores:
    """Send every image through the network once. The labels of `items` are places in the network's outputs; `forward`
    gives logits in another way than the network itself.

    Args:
        items: with labels as places in the outputs (`relabel`), each counted once.
        batch: images per forward pass and process.
        processes: shares the images among them; default: this one alone.
        after_batch: called equally often in every process; what it raises ends the scoring.

    Returns:
        The scores of all images, in the order of `items`, in every process.
    """
    processes = processes or Processes(device=device_of(network))
    mine = list(range(processes.rank, len(items), processes.count))
    # every process runs the same number of batches, which sharded networks need; the padding is cut off below
    padded = mine + [0] * (-(-len(items) // processes.count) - len(mine))
    rows = [np.empty((0, 5))]
    read = eval_batches(source, padded, items, preprocessing, batch, workers, pins_memory(processes.device))
    with evaluation_mode(network), closing(read) as batches:
        for images, targets in processes.together(batches):
            x = to_input(images, preprocessing, processes.device)
            rows.append(_rows((forward or network)(x).float(), to_device(targets, processes.device)))
            after_batch()
    table = np.empty((len(items), 5))
    for process, part in enumerate(processes.gather(np.concatenate(rows)[: len(mine)])):
        # Process r scored images r, r + count, ...: the same stride puts them back in order.
        table[process :: processes.count] = part
    names = names_or_indices(network.class_names, network.config.num_classes)
    labels, predicted, rank = (table[:, i].astype(int) for i in (0, 1, 3))
    return Scores(labels, predicted, table[:, 2], rank, table[:, 4], names, tuple(item.key for item in items))


def head_forward(network: Any, head: str, fusion: str = "logits") -> Callable[[Tensor], Tensor]:
    """A function from images (B, C, height, width) to the logits (B, classes) of one head of a distilled network.

    head     "class", "distill", or "both" (thesis 3.3)
    fusion   of both: "logits" is their mean, as in the published code and in the network's own forward pass in eval
             mode; "softmax" is the logarithm of the mean of their probabilities, as in the text
    """
    if getattr(network, "head_distill", None) is None:
        raise PatchloomError(f"{network.config.name} has one head: --head is for networks with a distillation token.")
    check_choice("--head", head, HEADS)
    check_choice("--fusion", fusion, FUSIONS)

    def forward(x: Tensor) -> Tensor:
        own, taught = network.head_logits(x)
        if head != "both":
            return own if head == "class" else taught
        return (own + taught) / 2 if fusion == "logits" else (own.softmax(-1) + taught.softmax(-1)).div(2).log()

    return forward


def _rows(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """(B, 5): label, prediction, its probability, rank of the label, loss."""
    probabilities = logits.softmax(dim=-1)
    confidence, predicted = probabilities.max(dim=-1)
    own = logits.gather(1, labels[:, None])
    above = (~(logits < own)).sum(dim=-1) - 1  # ties, and what is not a number, count against the network
    # On a tie argmax decides: the class it picks is the prediction, any other is at best second.
    rank = torch.where(predicted == labels, 0, above.clamp(min=1))
    # An output with NaN or infinity counts as wrong, with the last rank, whatever class argmax picks.
    rank = torch.where(logits.isfinite().all(dim=-1), rank, logits.shape[-1])
    loss = nn.functional.cross_entropy(logits, labels, reduction="none")
    columns = (labels, predicted, confidence, rank, loss)
    return torch.stack([column.cpu().double() for column in columns], dim=1).numpy()
