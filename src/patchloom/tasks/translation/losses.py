"""The training loss of translation: cross-entropy with label smoothing, over the tokens of a batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from patchloom.models.translation import PADDING


def token_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The sum of the loss over all tokens and their number, from logits (B, T, V) and labels (B, T), 0 for padding.

    Sums, so that a mean over several processes or accumulated batches weighs every token alike.
    """
    total = F.cross_entropy(
        # float32: the sum is over thousands of tokens and the softmax over tens of thousands of classes.
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=PADDING,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total, (labels != PADDING).sum()
