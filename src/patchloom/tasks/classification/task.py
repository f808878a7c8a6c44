"""Classification as a task of the loop: labels learned from augmented, mixed images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.data.images import to_batch, to_input
from patchloom.data.loader import Samples
from patchloom.data.mixing import Mixing, erase, soft_targets
from patchloom.data.order import Order, Steps
from patchloom.data.sources import spread
from patchloom.data.transforms import Augment, Augmentation, OneView
from patchloom.data.workers import Batches, load_batches
from patchloom.devices import pins_memory
from patchloom.inference.norms import branch_norms
from patchloom.models.network import Network
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.config import ClassificationConfig
from patchloom.tasks.classification.finish import finish
from patchloom.tasks.classification.images import Images
from patchloom.tasks.classification.losses import Loss, recipe_loss, summed_loss
from patchloom.tasks.classification.metrics import TOP1, Scores, score
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.task import Result, Task

NORM_IMAGES = 64  # of which branch norms are averaged
MODEL = "model"  # the one module of the task


class Classification(Task):
    """Images and labels in, logits compared with mixed targets."""

    metric = TOP1

    def __init__(
        self,
        config: ClassificationConfig,
        network: Network,
        images: Images,
        recipe: Recipe,
        processes: Processes,
        console: Console,
        loss: Loss | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.config, self.network, self.recipe = config, network, recipe
        self.processes, self.console = processes, console
        self.images, self.source, self.split = images, images.source, images.split
        self.modules = nn.ModuleDict({MODEL: network})
        self.loss, self.augmentation = loss, augmentation  # the user's own, in place of the recipe's
        self.order = Order(len(self.split.train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.mixing = Mixing(recipe.mixup, recipe.cutmix, recipe.mix_probability, recipe.switch_probability)
        self._scored: tuple[nn.Module, Scores] | None = None  # until the next step

    def batches(self, start: int, end: int) -> Batches:
        """(B, height, width, 3) uint8 images and (B,) labels."""
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(Augment)}
        own = self.augmentation
        augment = own or Augment(**{**fields, "flip": self.recipe.flip if self.source.flips else 0.0})
        view, recipe = OneView(augment, self.network.config.img_size), self.recipe
        fast = own is None and recipe.pixels == "fast"
        samples = Samples(self.source, self.split.train, view, recipe.seed, fast=fast)
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return load_batches(samples, steps, recipe.workers, pin=pins_memory(self.processes.device))

    def mixed(self, batch: tuple[Tensor, Tensor], step: int, part: int) -> tuple[Tensor, Tensor]:
        """Normalised, erased, mixed images (B, C, height, width) and their soft targets (B, classes)."""
        recipe = self.recipe
        images, labels = batch
        # Parts of an accumulated step and processes must draw differently, and the same on every resume.
        seed = (recipe.seed, step * recipe.accumulate + part, self.processes.rank)
        x = to_input(images, self.network.preprocessing)
        if recipe.erasing:
            x = erase(x, recipe.erasing, *seed)
        targets = soft_targets(labels, self.network.config.num_classes, recipe.label_smoothing)
        return self.mixing(x, targets, *seed)

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        """{"loss": (B,)}, one value per image."""
        self._scored = None
        if self.loss is not None:
            return {"loss": self._own_loss(batch)}
        x, targets = self.mixed(batch, step, part)
        outputs = self.network(x)
        pair = outputs if isinstance(outputs, tuple) else (outputs,)  # a distilled network learns with both heads
        # Without a teacher, the distillation head learns from the labels too; the loss is the mean of both.
        per_head = [recipe_loss(self.recipe, logits, targets) for logits in pair]
        return {"loss": torch.stack(per_head).mean(dim=0)}

    def _own_loss(self, batch: Any) -> Tensor:
        """The user's loss of logits and labels, which are not mixed or smoothed; one value per image, or their sum."""
        images, labels = batch
        outputs = self.network(to_input(images, self.network.preprocessing))
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return summed_loss(self.loss, logits, labels, len(labels))

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """Metrics of `Scores.metrics` on the held-out images, and branch norms where the recipe logs them."""
        network = modules[MODEL]
        metrics: dict[str, Any] = self.scores(network, after_batch).metrics() if self.split.held_out else {}
        return metrics | {"branch_norms": self._branch_norms(network)} if self.recipe.log_norms else metrics

    def _branch_norms(self, network: Any) -> dict[str, float]:
        """On some held-out images, or training images where none is held out; the same in every process."""
        items = spread(self.split.held_out or self.split.train, NORM_IMAGES)
        pictures = [self.source.picture(item) for item in items]
        return branch_norms(network, to_batch(pictures, self.network.preprocessing, self.processes.device))

    def scores(self, network: nn.Module, after_batch: Callable[[], None] = lambda: None) -> Scores:
        """The network's predictions on the held-out images; computed once for one state of its weights."""
        # The last evaluation of a run and its report ask for the same scores.
        if self._scored is None or self._scored[0] is not network:
            scores = score(
                network,
                self.source,
                self.split.held_out,
                self.network.preprocessing,
                batch=max(64, self.recipe.batch_size // self.processes.count),
                workers=self.recipe.workers,
                processes=self.processes,
                after_batch=after_batch,
            )
            self._scored = (network, scores)
        return self._scored[1]

    def metadata(self) -> dict[str, Any]:
        """What `load` needs to build the network from a checkpoint."""
        return self.network.metadata()

    def environment(self) -> dict[str, Any]:
        return {"data": self.images.to_json(self.config.data), "teachers": []}

    def finish(self, run: Run, result: Result) -> None:
        finish(self, run, result)
