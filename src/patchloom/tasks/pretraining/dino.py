"""DINO (Caron et al. 2021; thesis 4.3.2): a student learns what a slowly following teacher sees in other crops.

loss = cross-entropy of softmax(student / 0.1) with softmax((teacher - centre) / 0.04) of another crop.
The teacher sees two global crops, the student these and local ones. centre <- m centre + (1 - m) mean of the teacher's
outputs keeps one prototype from winning everything, the low temperature keeps all from becoming equally likely.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.data.images import to_input
from patchloom.data.loader import Transform
from patchloom.errors import PatchloomError
from patchloom.models.embedding import embedding_dim
from patchloom.models.network import Network
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.pretraining.attention import attention_section
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.crops import crop_views
from patchloom.tasks.pretraining.heads import DinoHead, distillation_loss, entropies
from patchloom.tasks.pretraining.method import Method, Progress, Setup
from patchloom.text import count
from patchloom.training.report import Section
from patchloom.training.schedule import Schedule

STUDENT, PROJECTOR, TEACHER, TEACHER_PROJECTOR = "student", "projector", "teacher", "teacher_projector"
GLOBAL_CROPS = 2
_EARLY = 0.1  # of a run, in which a healthy teacher may say little too
_TELLS = 0.01  # of ln K: what the teacher's outputs must tell of an image, in nats
_UNIFORM = 0.9  # of ln K, above which an entropy is that of all prototypes alike


class Dino(Method):
    """Crops in, the cross-entropy between student and teacher out."""

    exported = TEACHER
    frozen = (TEACHER, TEACHER_PROJECTOR)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        recipe, trunk = self.recipe, setup.trunk
        head = DinoHead(embedding_dim(trunk), recipe.head_hidden, recipe.head_bottleneck, recipe.prototypes)
        self.modules = nn.ModuleDict({STUDENT: trunk, PROJECTOR: head})
        self.modules.update({TEACHER: follower(trunk), TEACHER_PROJECTOR: follower(head)})
        self.centre = torch.zeros(recipe.prototypes)
        self.momentum = Schedule(recipe.teacher_momentum, recipe.teacher_momentum_end)
        warmup = min(recipe.teacher_warmup_epochs, setup.steps / setup.steps_per_epoch)
        self.temperature = Schedule(
            recipe.teacher_temperature, recipe.teacher_temperature, "constant", warmup, recipe.teacher_temperature_start
        )
        self._seen: list[tuple[Tensor, int]] = []  # of the step: sums of the teacher's outputs, and of how many

    @classmethod
    def check(cls, _: PretrainingConfig, recipe: Recipe, trunk: Any) -> None:
        patch, size = getattr(trunk, "patch_size", 1), recipe.local_size
        if recipe.local_crops and size is not None and size % patch and not is_fixed(trunk):
            raise PatchloomError(
                f"local_size={size} is not divisible by the patch size {patch} of {trunk.name}: set it to a multiple, "
                f"or to none for half of the network's size."
            )

    @property
    def local_size(self) -> tuple[int, int]:
        """The size of local crops: the network's own where its layers have weights per patch."""
        trunk: Any = self.setup.trunk
        return local_size(trunk, self.recipe.local_size)

    def transform(self, flips: bool) -> Transform:
        size = self.setup.trunk.config.img_size
        return crop_views(self.recipe, size, self.local_size, flips)

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        """{"dino": (B,)} of a tuple of crops, the global ones first, (B, height, width, 3) uint8 each."""
        if part == 0:  # a step that was given up may have left some
            self._seen.clear()
        groups = [to_input(torch.cat(crops), self.setup.trunk.preprocessing) for crops in by_size(batch)]
        with torch.no_grad():
            targets = self._targets(groups[0][: GLOBAL_CROPS * len(batch[0])], step)
        student: Any = self.modules[STUDENT]
        # One forward pass per size; crops of several sizes in one gain nothing on a CPU.
        vectors = torch.cat([student.embed(images) for images in groups])
        logits = self.modules[PROJECTOR](vectors, self.recipe.student_temperature)
        shape = (-1, len(batch[0]), logits.shape[-1])
        return {"dino": distillation_loss(logits.view(shape).float(), targets.view(shape))}

    def _targets(self, images: Tensor, step: int) -> Tensor:
        """The teacher's probabilities (2 B, K) for global crops; notes its outputs for the centre."""
        teacher: Any = self.modules[TEACHER]
        outputs = self.modules[TEACHER_PROJECTOR](teacher.embed(images)).float()
        self._seen.append((outputs.sum(dim=0), len(outputs)))
        return self._probabilities(outputs, step)

    def _probabilities(self, outputs: Tensor, step: int) -> Tensor:
        steps, per_epoch = self.setup.steps, self.setup.steps_per_epoch
        temperature = self.temperature.at(step / per_epoch, steps / per_epoch)
        return ((outputs - self.centre) / temperature).softmax(dim=-1)

    def after_backward(self, step: int) -> None:
        if step < self.recipe.freeze_last_layer * self.setup.steps_per_epoch:
            self.modules[PROJECTOR].prototypes.weight.grad = None  # type: ignore[union-attr]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        momentum = self.momentum.at(step - 1, self.setup.steps)
        for slow, fast in ((TEACHER, STUDENT), (TEACHER_PROJECTOR, PROJECTOR)):
            torch._foreach_lerp_(
                list(self.modules[slow].parameters()), list(self.modules[fast].parameters()), 1 - momentum
            )
        # Over all parts of the step and all processes.
        total = self.processes.sum(torch.stack([part for part, _ in self._seen]).sum(dim=0))
        mean = total / self.processes.total(float(sum(number for _, number in self._seen)))
        self.centre.lerp_(mean, 1 - self.recipe.center_momentum)
        self._seen.clear()

    def to(self, device: torch.device) -> None:
        self.centre = self.centre.to(device)

    def state(self) -> dict[str, Tensor]:
        return {"centre": self.centre}

    # What is shown

    def measure(self, modules: nn.ModuleDict, images: Tensor) -> dict[str, float]:
        teacher: Any = modules[TEACHER]
        outputs = modules[TEACHER_PROJECTOR](teacher.embed(images)).float()
        each, mean = entropies(((outputs - self.centre) / self.recipe.teacher_temperature).softmax(dim=-1))
        return {"entropy": each, "entropy_of_mean": mean}

    def collapse(self, numbers: Mapping[str, float], progress: Progress) -> str | None:
        each, mean, most = numbers["entropy"], numbers["entropy_of_mean"], math.log(self.recipe.prototypes)
        if progress.step < _EARLY * progress.steps or mean - each > _TELLS * most:
            return None
        found = f"The teacher's entropy is {each:.2f} of at most {most:.2f} for an image, {mean:.2f} for their mean: "
        if each > _UNIFORM * most:
            return (
                f"{found}every image gets all prototypes alike. Likely cause: a teacher that is not sharp enough, or "
                f"that follows too fast. Lower teacher_temperature ({self.recipe.teacher_temperature:g}), raise "
                f"teacher_momentum ({self.recipe.teacher_momentum:g}), or lower lr ({self.recipe.lr:.3g})."
            )
        return (
            f"{found}all images get the same prototypes. Likely cause: a centre that does not follow, or a learning "
            f"rate that is too high. Lower center_momentum ({self.recipe.center_momentum:g}; published 0.9), lr "
            f"({self.recipe.lr:.3g}), or raise teacher_temperature ({self.recipe.teacher_temperature:g})."
        )

    def charts(self) -> dict[str, dict[str, str]]:
        return {"entropy of the teacher": {"of an image": "entropy", "of the mean": "entropy_of_mean"}}

    def sections(self, modules: nn.ModuleDict, pictures: Sequence[Image.Image], images: Tensor) -> list[Section]:
        teacher: Any = modules[TEACHER]
        return [attention_section(teacher, pictures, images)]

    def describe(self) -> str:
        recipe, (height, width) = self.recipe, self.local_size
        crops = f"{count(recipe.local_crops, 'local crop')} of {height} x {width}" if recipe.local_crops else "no local"
        return (
            f"DINO: 2 global crops of {self.setup.trunk.config.img_size[0]} x {self.setup.trunk.config.img_size[1]} "
            f"and {crops}, {recipe.prototypes} prototypes (ln K = {math.log(recipe.prototypes):.2f})"
        )


def follower(module: Any) -> Any:
    """A copy that follows its module: nothing is dropped at random, BatchNorm uses the statistics of its own batch, as
    published."""
    copied = copy.deepcopy(module).requires_grad_(False).eval()
    for part in copied.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train()
    return copied


def by_size(crops: Sequence[Tensor]) -> list[list[Tensor]]:
    """Crops in groups of one size, in their order."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for crop in crops:
        groups.setdefault(crop.shape[1:], []).append(crop)
    return list(groups.values())


def is_fixed(trunk: Any) -> bool:
    """Whether a network, or its config, takes one image size alone."""
    return bool(getattr(trunk, "fixed_grid", False) or getattr(trunk, "fixed_size", False))


def local_size(trunk: Network, size: int | None) -> tuple[int, int]:
    """The size of local crops: `size`, by default half of the network's in whole patches; a network that takes one
    size alone gets them enlarged to it."""
    own = trunk.config.img_size
    if is_fixed(trunk):
        return own
    if size is not None:
        return size, size
    patch = getattr(trunk.config, "patch_size", 1)
    return tuple(max(patch, side // 2 // patch * patch) for side in own)
