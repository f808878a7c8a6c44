"""Supervised learning with a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.images import to_input
from patchloom.data.order import Key, Order, Steps
from patchloom.data.workers import Batches, load_batches
from patchloom.devices import pins_memory, to_device
from patchloom.errors import errors_in
from patchloom.models.network import evaluation_mode
from patchloom.models.preprocessing import Preprocessing
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.losses import Loss, summed_loss
from patchloom.tasks.own.config import OwnConfig
from patchloom.tasks.own.samples import PIXELS, TARGETS, TENSORS, OwnSamples
from patchloom.tasks.spec import Context
from patchloom.text import describe
from patchloom.training.checks import check_batch
from patchloom.training.run import Run
from patchloom.training.task import Metric, Result, Task

MODEL = "model"


class Supervised(Task):
    """`loss(model(inputs), targets)` is minimised. Inputs and targets are what the samples hold, stacked.

    Args:
        loss: (outputs, targets) -> a mean over the batch, or one value per sample (B,).
        train, held_out: samples by key; if none are held out, the run has no metric.
        preprocessing: for inputs that are images; tensors of the dataset are used as they are.
    """

    def __init__(
        self,
        config: OwnConfig,
        model: nn.Module,
        loss: Loss,
        train: OwnSamples,
        held_out: OwnSamples,
        preprocessing: Preprocessing,
        recipe: Recipe,
        context: Context,
    ) -> None:
        self.config, self.loss, self.recipe, self.preprocessing = config, loss, recipe, preprocessing
        self.processes, self.console = context.processes, context.console
        self.train_samples, self.held_out = train, held_out
        check_batch(recipe, len(train), self.processes.count)
        self.modules = nn.ModuleDict({MODEL: model})
        self.order = Order(len(train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.metric = Metric("loss", higher_is_better=False) if len(held_out) else None

    def batches(self, start: int, end: int) -> Batches:
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return self._load(self.train_samples, steps)

    def _load(self, samples: OwnSamples, batches: Any) -> Batches:
        return load_batches(samples, batches, self.recipe.workers, pin=pins_memory(self.processes.device))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        outputs = self._forward(self.modules[MODEL], batch)
        return {"loss": summed_loss(self.loss, outputs, batch[TARGETS], int(self.weight(batch)))}

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        # Pixels (B, height, width, 3) are normalised; tensors of the dataset are used as they are, of uint8 too.
        inputs = to_input(batch[PIXELS], self.preprocessing) if PIXELS in batch else batch[TENSORS]
        with errors_in(f"The model, called with {describe(inputs)},"):
            return model(inputs)

    @torch.no_grad()
    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """The mean loss, and the accuracy where outputs (B, classes) meet integer targets (B,)."""
        if not len(self.held_out):
            return {}
        model = modules[MODEL]
        with evaluation_mode(model):
            loss, right, count = self._measure(model, after_batch)
        # One process may have held batches of another kind: top1 is given only where all could count.
        classified = all(part is not None for part in self.processes.gather(right))
        total, samples = self.processes.total(loss), self.processes.total(count)
        # Sums over all processes, then the mean: shares of different sizes count as they should.
        metrics: dict[str, Any] = {"count": int(samples), "loss": total / samples}
        return metrics | ({"top1": self.processes.total(right or 0) / samples} if classified else {})

    def _measure(self, model: nn.Module, after_batch: Callable[[], None]) -> tuple[float, int | None, int]:
        """Sum of losses, right answers (None: these are not classes) and samples of this process.

        Every process runs as many batches as the others, which sharded modules need; what is over is not counted."""
        mine, padded = self._held_out_batches()
        loss, right, count = 0.0, 0, 0
        classes = True
        with closing(self._load(self.held_out, padded)) as batches:
            for i, batch in enumerate(self.processes.together(batches)):
                moved = to_device(batch, self.processes.device)
                samples, targets = int(self.weight(moved)), moved[TARGETS]
                outputs = self._forward(model, moved)
                if i < mine:
                    loss += float(summed_loss(self.loss, outputs, targets, samples).sum())
                    count += samples
                    classes = classes and _are_classes(outputs, targets)
                    right += int((outputs.argmax(dim=1) == targets.long()).sum()) if classes else 0
                after_batch()
        return loss, right if classes else None, count

    def _held_out_batches(self) -> tuple[int, list[list[Key]]]:
        """How many batches are this process's own, and those with as many more as the others have."""
        size = max(1, min(self.recipe.batch_size, len(self.held_out)))
        keys: list[Key] = [(i, 0, 0) for i in range(len(self.held_out))]
        batches = [keys[i : i + size] for i in range(0, len(keys), size)]
        mine = batches[self.processes.rank :: self.processes.count]
        # The most that any process has; the others run some batches of the beginning once more, uncounted.
        most = -(-len(batches) // self.processes.count)
        return len(mine), [*mine, *batches[: most - len(mine)]]

    def environment(self) -> dict[str, Any]:
        return {"data": {"where": self.config.data, "training": len(self.train_samples), "held": len(self.held_out)}}

    def finish(self, run: Run, result: Result) -> None:
        super().finish(run, result)
        self.console.say(f"The report is {run.folder / 'report.html'}, the weights are in {run.folder / 'export'}.")


def _are_classes(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
