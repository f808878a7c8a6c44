"""The instance loss of Grafit (thesis Eq. 2.1) and the triplet loss of its preliminary study (2.2). The kNN loss is in
`memory.py`. All give one value per image (B,) in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def instance_loss(predicted: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Eq. 2.1: minus the mean cosine of prediction i with target j, over the T (T - 1) ordered pairs i != j.

    T views each of shape (B, D). The sum over all pairs is the product of two sums over views; those with i = j are
    taken off. `plain_instance_loss` is the same pair by pair.
    """
    q, z = _units(predicted), _units(targets)
    pairs = len(q) * (len(q) - 1)
    everything = (q.sum(dim=0) * z.sum(dim=0)).sum(dim=1)
    return ((q * z).sum(dim=(0, 2)) - everything) / pairs


def plain_instance_loss(predicted: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Eq. 2.1 as it is written."""
    views = range(len(predicted))
    pairs = [(i, j) for i in views for j in views if i != j]
    cosines = [F.cosine_similarity(predicted[i].float(), targets[j].float(), dim=1) for i, j in pairs]
    return -torch.stack(cosines).sum(dim=0) / len(pairs)


def _units(vectors: Sequence[Tensor]) -> Tensor:
    """Unit vectors (T, B, D)."""
    stacked = torch.stack(tuple(vectors))
    return F.normalize(stacked if stacked.dtype == torch.float64 else stacked.float(), dim=2)


def triplet_loss(anchors: Tensor, positives: Tensor, margin: float, mining: str) -> Tensor:
    """max(0, |a - p|^2 - |a - n|^2 + margin) of unit vectors: a and p are two views of an image, n is the second view
    of another image of the batch.

    semihard   the nearest n that is further away than p, else the furthest (Schroff et al. 2015)
    hard       the nearest n
    all        the mean over every n
    """
    a, p = F.normalize(anchors.float(), dim=1), F.normalize(positives.float(), dim=1)
    if len(a) < 2:
        return a.sum(dim=1) * 0.0
    distances = (2 - 2 * a @ p.T).clamp(min=0)
    near = distances.diagonal()
    itself = torch.eye(len(a), dtype=torch.bool, device=a.device)
    if mining == "all":
        losses = (near[:, None] - distances + margin).clamp(min=0).masked_fill(itself, 0)
        return losses.sum(dim=1) / (len(a) - 1)
    chosen = distances.detach().masked_fill(itself, torch.inf)
    if mining == "semihard":
        further = chosen.masked_fill(chosen <= near.detach()[:, None], torch.inf)
        furthest = chosen.masked_fill(itself, -torch.inf).argmax(dim=1)
        place = torch.where(further.isfinite().any(dim=1), further.argmin(dim=1), furthest)
    else:
        place = chosen.argmin(dim=1)
    return (near - distances.gather(1, place[:, None])[:, 0] + margin).clamp(min=0)
