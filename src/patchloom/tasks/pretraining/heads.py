"""DINO's head, and what its outputs say."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.init import init_module


class DinoHead(nn.Module):
    """Embeddings (B, D) -> scores of prototypes (B, K): three layers with GELU, a unit vector, and its cosines with
    unit prototypes (a weight-normed layer whose gain is 1, published `norm_last_layer`)."""

    def __init__(self, dim: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.mlp.apply(init_module)
        self.prototypes = nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, x: Tensor, temperature: float = 1.0) -> Tensor:
        """Cosines divided by `temperature`, (B, K)."""
        # The division before the product: it is of B x bottleneck numbers instead of B x K.
        units = F.normalize(self.mlp(x).float(), dim=-1) / temperature
        return F.linear(units, F.normalize(self.prototypes.weight, dim=-1))


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The cross-entropy of every crop of the student with every other global crop of the teacher, averaged over these
    pairs: (B,).

    Args:
        student: logits (crops, B, K), the global crops first.
        teacher: probabilities (global crops, B, K), without gradients.
    """
    crops, targets = len(student), len(teacher)
    # -sum_k p log softmax(z) = logsumexp(z) - sum_k p z, as p sums to 1; a target is compared with all crops but its
    # own, so the crops are added up before the product.
    log_sums, every = student.logsumexp(dim=-1), student.sum(dim=0)
    loss = targets * log_sums.sum(dim=0) - log_sums[:targets].sum(dim=0)
    for target, own in zip(teacher, student, strict=False):
        loss = loss - torch.einsum("bk,bk->b", target, every - own)
    return loss / max(1, targets * (crops - 1))


def entropies(probabilities: Tensor) -> tuple[float, float]:
    """The mean entropy of rows (N, K), and the entropy of their mean, in nats. Both near ln K: every image gets the
    uniform distribution. Both near 0: every image gets the same prototype."""
    each = torch.special.entr(probabilities).sum(dim=1).mean()
    return float(each), float(torch.special.entr(probabilities.mean(dim=0)).sum())
