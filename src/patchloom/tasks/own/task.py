"""Supervised learning with the user's own module, data set, loss or augmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.data.images import to_input
from patchloom.data.order import Order, Steps
from patchloom.data.workers import Batches, load_batches
from patchloom.devices import pins_memory, to_device
from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.own.config import OwnConfig
from patchloom.tasks.own.samples import Samples
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.task import Metric, Result, Task, first_tensor
from patchloom.weights.save import save

MODEL = "model"
Loss = Callable[[Any, Any], Tensor]


class Supervised(Task):
    """`loss(model(inputs), targets)` is minimised. Inputs and targets are what the samples hold, stacked.

    Args:
        model: Any module; its output goes to the loss.
        loss: (outputs, targets) -> one value for the batch, its mean, or one value per sample (B,).
        train: Samples to learn from.
        held_out: Samples to measure on; may be empty.
    """

    def __init__(
        self,
        config: OwnConfig,
        model: nn.Module,
        loss: Loss,
        train: Samples,
        held_out: Samples,
        preprocessing: Preprocessing,
        recipe: Recipe,
        processes: Processes,
        console: Console,
    ) -> None:
        self.config, self.loss, self.recipe = config, loss, recipe
        self.processes, self.console = processes, console
        self.train_samples, self.held_out, self.preprocessing = train, held_out, preprocessing
        self.modules = nn.ModuleDict({MODEL: model})
        self.order = Order(len(train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.metric = Metric("loss", higher_is_better=False) if len(held_out) else None

    def batches(self, start: int, end: int) -> Batches:
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return load_batches(self.train_samples, steps, self.recipe.workers, pin=pins_memory(self.processes.device))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        return {"loss": self._loss_sum(self.modules[MODEL], batch)[0]}

    def _loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The loss, summed over the batch, and the outputs."""
        inputs, targets = batch
        if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:  # images (B, height, width, 3)
            inputs = to_input(inputs, self.preprocessing)
        outputs = model(inputs)
        value = self.loss(outputs, targets)
        if not isinstance(value, Tensor) or value.ndim > 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PatchloomError(
                f"The loss returns {shape}. It returns a tensor: one value for the batch (its mean), or one per sample."
            )
        return (value * len(first_tensor(inputs)) if value.ndim == 0 else value.sum()), outputs

    @torch.no_grad()
    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """The mean loss, and the accuracy where outputs (B, classes) meet integer targets (B,)."""
        if not len(self.held_out):
            return {}
        model, device = modules[MODEL], self.processes.device
        was_training = model.training
        model.eval()
        loss, right, count, classified, done = 0.0, 0, 0, True, 0
        mine = self._held_out_batches()
        most = max(self.processes.gather(len(mine)))
        try:
            with closing(load_batches(self.held_out, mine, self.recipe.workers)) as batches:
                for batch in batches:
                    inputs, targets = batch = to_device(batch, device)
                    value, outputs = self._loss_sum(model, batch)
                    loss, count = loss + float(value), count + len(first_tensor(inputs))
                    classified = classified and _are_classes(outputs, targets)
                    right += int((outputs.argmax(dim=1) == targets).sum()) if classified else 0
                    after_batch()
                    done += 1
        finally:
            model.train(was_training)
        for _ in range(most - done):  # every process calls it equally often
            after_batch()
        total, seen = self.processes.total(loss), self.processes.total(count)
        metrics: dict[str, Any] = {"count": int(seen), "loss": total / seen}
        return metrics | ({"top1": self.processes.total(right) / seen} if classified else {})

    def _held_out_batches(self) -> Sequence[list[tuple[int, int, int]]]:
        """The keys of this process's batches: each sample once over all processes."""
        size = max(1, min(self.recipe.batch_size, len(self.held_out)))
        keys = [(i, 0, 0) for i in range(self.processes.rank, len(self.held_out), self.processes.count)]
        return [keys[i : i + size] for i in range(0, len(keys), size)]

    def environment(self) -> dict[str, Any]:
        return {"data": {"where": self.config.data, "training": len(self.train_samples), "held": len(self.held_out)}}

    def finish(self, run: Run, result: Result) -> None:
        """A network of ours is saved so that `load` takes it, any other module with its own tensors."""
        network = result.modules[MODEL]
        super().finish(run, result)
        if isinstance(network, Network) and self.processes.is_main_process:
            save(network, run.folder / "export" / "model.safetensors")
        self.console.say(f"The report is {run.folder / 'report.html'}, the weights are in {run.folder / 'export'}.")


def _are_classes(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
