"""Distillation: labels and a teacher together (thesis 3.3)."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.tasks.classification.config import DistillationConfig
from patchloom.tasks.classification.losses import recipe_loss
from patchloom.tasks.classification.task import Classification
from patchloom.tasks.classification.teachers import Teachers


class Distillation(Classification):
    """Classification whose images are shown to teachers too, as augmented and mixed as the network sees them."""

    teachers: Teachers

    @property
    def distillation(self) -> DistillationConfig:
        assert self.config.distillation is not None
        return self.config.distillation

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        """Two terms, already weighted: "labels" and "teacher", one value per image (B,) each.

        The teacher sees the very images that the student sees: augmented, erased and mixed. It computes without
        gradients, or its logits come from a cache.
        """
        self._scored = None
        x, targets = self.mixed(batch, step, part)
        outputs = self.network(x)
        # without a distillation token both terms have the same logits (Eq. 3.3 as printed)
        own, taught = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        number = step * self.recipe.accumulate + part
        teacher_logits = self.teachers(x, self.network.preprocessing, number, self.processes.rank)
        # Eq. 3.2 (soft) and Eq. 3.3 (hard): (1 - share) L(labels) + share L(teacher).
        share = self.distillation.share
        return {
            "labels": (1 - share) * recipe_loss(self.recipe, own, targets),
            "teacher": share * teacher_loss(self.distillation, taught, teacher_logits),
        }

    def environment(self) -> dict[str, Any]:
        identities = [teacher.identity for teacher, _ in self.teachers.teachers]
        return {**super().environment(), "teachers": json.loads(json.dumps(identities))}  # as JSON gives it back


def teacher_loss(config: DistillationConfig, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The teacher's term, one value per image (B,)."""
    if config.method == "soft":
        return soft_loss(logits, teacher_logits, config.tau, config.kl)
    # The teacher's decision is a label like any other (hard distillation).
    return F.cross_entropy(logits, teacher_logits.argmax(dim=-1), reduction="none")  # Eq. 3.3; no smoothing


def soft_loss(logits: Tensor, teacher_logits: Tensor, tau: float, kl: str = "paper") -> Tensor:
    """tau^2 KL between softmax(logits / tau) and softmax(teacher_logits / tau), (B,).

    paper       KL(student || teacher), as Eq. 3.2 writes it
    published   KL(teacher || student) divided by the number of classes, as the authors' code computes it
    """
    student, teacher = (values.float().div(tau).log_softmax(dim=-1) for values in (logits, teacher_logits))
    # torch's F.kl_div(student, teacher) is KL(teacher || student): the authors' call has its arguments in that order.
    if kl == "published":
        return tau**2 * (teacher.exp() * (teacher - student)).sum(dim=-1) / logits.shape[-1]
    return tau**2 * (student.exp() * (student - teacher)).sum(dim=-1)


def token_parameter_cosine(network: Any) -> float:
    """The cosine between the parameters of class and distillation token, without their positions."""
    one, other = (token.detach()[0, 0].float() for token in (network.class_token, network.distill_token))
    return float(F.cosine_similarity(one, other, dim=-1))


def token_cosines(network: Any, images: Tensor) -> list[float]:
    """The cosine between class and distillation token before the first block (positions included) and after each,
    averaged over images (thesis 3.3).

    Args:
        network: a distilled network of patchloom, not fused.
        images: normalised, (B, 3, height, width).
    """
    found: list[float] = []

    def note(tokens: Tensor) -> None:
        pair = F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float(), dim=-1)
        found.append(float(pair.mean()))

    # Tokens that do not join the trunk (CaiT) first appear in the aggregation.
    stages = network.blocks[network.join_at :] if network.join_at is not None else network.pool
    hooks = [stages[0].register_forward_pre_hook(lambda _, inputs: note(inputs[0]))]
    hooks += [block.register_forward_hook(lambda _, __, output: note(output)) for block in stages]
    try:
        with torch.inference_mode():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found
