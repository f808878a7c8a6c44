"""Classification: the task of the loop that learns labels from augmented, mixed images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchloom.data.images import to_batch, to_input
from patchloom.data.loader import Samples
from patchloom.data.mixing import Mixing, erase, soft_targets
from patchloom.data.order import Order, Steps
from patchloom.data.sources import Source, spread
from patchloom.data.splits import Split
from patchloom.data.transforms import Augment, OneView
from patchloom.data.workers import Batches, load_batches
from patchloom.inference.norms import branch_norms
from patchloom.models.network import Network
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.losses import recipe_loss
from patchloom.tasks.classification.metrics import Scores, score
from patchloom.training.loop import Batch
from patchloom.training.processes import Processes

NORM_IMAGES = 64  # of which branch norms are averaged


class Classify:
    """The task of the loop: images and labels in, logits compared with mixed targets."""

    metric = "top1"

    def __init__(self, network: Network, source: Source, split: Split, recipe: Recipe, processes: Processes) -> None:
        self.network, self.source, self.split, self.recipe = network, source, split, recipe
        self.processes = processes
        self.order = Order(len(split.train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch, self.images_per_step = self.order.steps_per_epoch, self.order.images_per_step
        self.mixing = Mixing(recipe.mixup, recipe.cutmix, recipe.mix_probability, recipe.switch_probability)

    def batches(self, start: int, end: int) -> Batches:
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(Augment)}
        augment = Augment(**{**fields, "flip": self.recipe.flip if self.source.flips else 0.0})
        view, recipe = OneView(augment, self.network.config.img_size), self.recipe
        samples = Samples(self.source, self.split.train, view, recipe.seed, fast=augment.pixels == "fast")
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return load_batches(samples, steps, recipe.workers)

    def prepare(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Normalised, erased, mixed images and their soft targets (B, classes)."""
        recipe = self.recipe
        images, labels = batch
        seed = (recipe.seed, step, self.processes.rank)
        x = to_input(images, self.network.preprocessing)
        if recipe.erasing:
            x = erase(x, recipe.erasing, *seed)
        targets = soft_targets(labels, self.network.config.num_classes, recipe.label_smoothing)
        return self.mixing(x, targets, *seed)

    def losses(self, network: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        x, targets = self.prepare(batch, step)
        outputs = network(x)
        pair = outputs if isinstance(outputs, tuple) else (outputs,)  # a distilled network learns with both heads
        per_head = [recipe_loss(self.recipe, logits, targets) for logits in pair]
        return {"loss": torch.stack(per_head).mean(dim=0)}

    def evaluate(self, network: Network, after_batch: Callable[[], None]) -> dict[str, Any]:
        figures: dict[str, Any] = self.scores(network, after_batch).figures() if self.split.held_out else {}
        return figures | {"branch_norms": self._branch_norms(network)} if self.recipe.log_norms else figures

    def _branch_norms(self, network: Network) -> dict[str, float]:
        """On some held-out images, or training images where none is held out; the same in every process."""
        items = spread(self.split.held_out or self.split.train, NORM_IMAGES)
        pictures = [self.source.picture(item) for item in items]
        return branch_norms(network, to_batch(pictures, self.network.preprocessing, self.processes.device))

    def scores(self, network: Network, after_batch: Callable[[], None] = lambda: None) -> Scores:
        """What the network says of the held-out images."""
        return score(
            network,
            self.source,
            self.split.held_out,
            self.network.preprocessing,
            batch=max(64, self.recipe.batch_size // self.processes.count),
            workers=self.recipe.workers,
            processes=self.processes,
            after_batch=after_batch,
        )

    def about(self) -> dict[str, Any]:
        return {
            "config": self.network.config.to_json(),
            "class_names": self.network.class_names,
            "preprocessing": self.network.preprocessing.to_json(),
        }
