"""Pre-training as a task of the loop: a method's modules, views and losses; probes and numbers at every evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.data.images import to_batch
from patchloom.data.loader import Samples
from patchloom.data.order import Order, Steps
from patchloom.data.workers import Batches, load_batches
from patchloom.devices import pins_memory
from patchloom.models.network import Network, evaluation_mode
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.finish import finish
from patchloom.tasks.pretraining.images import monitored
from patchloom.tasks.pretraining.method import Method, Progress
from patchloom.tasks.pretraining.probes import Probes
from patchloom.tasks.pretraining.spread import feature_spread, same_features
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import total_steps
from patchloom.training.task import Result, Task


class Pretraining(Task):
    """Views of images in, the losses of a method out."""

    evaluates_start = True

    def __init__(
        self,
        config: PretrainingConfig,
        method: Method,
        images: Images,
        recipe: Recipe,
        processes: Processes,
        console: Console,
    ) -> None:
        self.config, self.method, self.recipe = config, method, recipe
        self.processes, self.console = processes, console
        self.modules = method.modules
        self.source, self.split = images.source, images.split
        self.skipped, self.fingerprint = images.skipped, images.fingerprint
        self.order = Order(len(self.split.train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.total = total_steps(recipe, self.steps_per_epoch)
        self.probes = Probes(self.source, self.split, recipe, processes)
        self.step = torch.zeros((), dtype=torch.int64)
        self._warned: str | None = None

    @property
    def trunk(self) -> Network:
        """The network that is probed and exported."""
        return self.modules[self.method.exported]  # type: ignore[return-value]

    # What the loop asks for

    @property
    def trained(self) -> Collection[str]:
        return [name for name in self.modules if name not in self.method.frozen]

    @property
    def averaged(self) -> Collection[str]:
        return [self.method.exported]

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.method.to(device)

    def state(self) -> dict[str, Tensor]:
        return {"step": self.step, **self.method.state()}

    def batches(self, start: int, end: int) -> Batches:
        """Samples of the method's transform, collated."""
        recipe = self.recipe
        transform = self.method.transform(self.source.flips)
        samples = Samples(self.source, self.split.train, transform, recipe.seed, fast=recipe.pixels == "fast")
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return load_batches(samples, steps, recipe.workers, pin=pins_memory(self.processes.device))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        return self.method.losses(batch, step, part)

    def after_backward(self, step: int) -> None:
        self.method.after_backward(step)

    def after_step(self, step: int) -> None:
        self.step.fill_(step)
        self.method.after_step(step)

    # Measuring

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """The spread of the features, the method's own numbers, and the probes where they are due."""
        with evaluation_mode(modules), torch.no_grad():
            numbers = self.measure(modules)
            after_batch()
            self._judge(numbers)
            probed = self._probe(modules, after_batch)
        return {**numbers, **probed}

    def measure(self, modules: nn.ModuleDict) -> dict[str, float]:
        """Numbers on the monitored images, the same in every process."""
        network: Any = modules[self.method.exported]
        images = self._monitored.to(self.processes.device)
        return {"std": feature_spread(network.embed(images)), **self.method.measure(modules, images)}

    @functools.cached_property
    def _monitored(self) -> Tensor:
        """(N, C, height, width): test crops of some training images."""
        pictures = [self.source.picture(item) for item in monitored(self.split, self.trunk.config.img_size)]
        return to_batch(pictures, self.trunk.preprocessing)

    def _judge(self, numbers: Mapping[str, float]) -> None:
        """Warn of a collapse."""
        progress = Progress(int(self.step), self.total)
        message = same_features(numbers["std"]) or self.method.collapse(numbers, progress) if progress.step else None
        if message is not None and self._warned is None:  # once, although its numbers change
            self.console.say(f"Warning: the run has collapsed. {message}")
        self._warned = message

    def _probe(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, float]:
        if not self.probes.due(int(self.step), self.steps_per_epoch, self.total):
            return {}
        found = self.probes.measure(modules[self.method.exported], self.trunk.preprocessing, after_batch)
        self.console.say(f"  probes: {self.probes.text(found)}")
        return found

    # What is written

    def metadata(self) -> dict[str, Any]:
        """What describes the modules in a checkpoint."""
        network = self.trunk
        return {"config": network.config.to_json(), "preprocessing": network.preprocessing.to_json()}

    def environment(self) -> dict[str, Any]:
        """Enough of the data to notice a change, and which images the run never saw."""
        data: dict[str, Any] = {
            "where": self.config.data,
            "fingerprint": self.fingerprint,
            "skipped": dict(self.skipped),
            "split": self.split.summary,
        }
        if self.split.test_name is None:
            data["held_out"] = [item.key for item in self.split.held_out]
        return {"data": data}

    def finish(self, run: Run, result: Result) -> None:
        finish(self, run, result)
