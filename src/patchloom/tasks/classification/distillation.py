"""Distillation: labels and a teacher together (thesis 3.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.runs.config import Teaching
from patchloom.tasks.classification.losses import recipe_loss
from patchloom.tasks.classification.task import Classify
from patchloom.tasks.classification.teachers import Teachers
from patchloom.training.loop import Batch


class Distill(Classify):
    """Classification whose images are shown to teachers too, as augmented and mixed as the network sees them."""

    teaching: Teaching
    teachers: Teachers

    def losses(self, network: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        x, targets = self.prepare(batch, step)
        outputs = network(x)
        # without a distillation token both terms have the same logits (Eq. 3.3 as printed)
        own, taught = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        said = self.teachers(x, self.network.preprocessing, step, self.processes.rank)
        share = self.teaching.share
        return {
            "labels": (1 - share) * recipe_loss(self.recipe, own, targets),
            "teacher": share * teacher_loss(self.teaching, taught, said),
        }


def teacher_loss(teaching: Teaching, logits: Tensor, said: Tensor) -> Tensor:
    """The teacher's term, one value an image (B,)."""
    if teaching.how == "soft":
        return soft_loss(logits, said, teaching.tau, teaching.kl)
    return F.cross_entropy(logits, said.argmax(dim=-1), reduction="none")  # Eq. 3.3; no smoothing


def soft_loss(logits: Tensor, said: Tensor, tau: float, kl: str = "paper") -> Tensor:
    """tau^2 KL between softmax(logits / tau) and softmax(said / tau), (B,).

    paper       KL(student || teacher), as Eq. 3.2 writes it
    published   KL(teacher || student) divided by the number of classes, as the authors' code computes it
    """
    student, teacher = (values.float().div(tau).log_softmax(dim=-1) for values in (logits, said))
    if kl == "published":
        return tau**2 * (teacher.exp() * (teacher - student)).sum(dim=-1) / logits.shape[-1]
    return tau**2 * (student.exp() * (student - teacher)).sum(dim=-1)


def token_parameter_cosine(network: Any) -> float:
    """The cosine between the parameters of class and distillation token, without their positions."""
    one, other = (token.detach()[0, 0].float() for token in (network.class_token, network.distill_token))
    return float(F.cosine_similarity(one, other, dim=-1))


def token_cosines(network: Any, images: Tensor) -> list[float]:
    """The cosine between class and distillation token before the first block (positions included) and after each,
    averaged over images (thesis 3.3)."""
    found: list[float] = []

    def note(tokens: Tensor) -> None:
        pair = F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float(), dim=-1)
        found.append(float(pair.mean()))

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
