"""What the training loop costs beside the arithmetic, and how long a checkpoint holds training up.

    python benchmarks/training.py [--overhead deit_tiny] [--checkpoint deit_base] [--steps 12] [--json FILE]

Overhead: the share of the wall-clock that is not forward, backward, optimizer step or waiting for data. Stall: the time
that a save of weights, average and optimizer takes from the loop; the writing goes on beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchloom.console import Console
from patchloom.models.registry import build, find_config
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.losses import cross_entropy
from patchloom.training.loop import Loop
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.task import Task


class Noise(Task):
    """A task without data: random images, so that nothing but the loop and the network is measured."""

    def __init__(self, network: Any, steps: int, batch: int) -> None:
        self.modules, self.steps_per_epoch = nn.ModuleDict({"model": network}), steps
        size = network.config.img_size
        self.batch = torch.randn(batch, 3, *size), torch.randint(0, 10, (batch,))

    def batches(self, start: int, end: int) -> Any:
        return (self.batch for _ in range(start, end))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        targets = nn.functional.one_hot(batch[1], 10).float()
        return {"loss": cross_entropy(self.modules["model"](batch[0]), targets)}

    def evaluate(self, modules: nn.ModuleDict, after_batch: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}


class Timed(Loop):
    """The loop with a clock around what it does for the task, and around its saves."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.spent = {"arithmetic": 0.0, "saves": [], "steps": []}  # type: dict[str, Any]
        step = self.optimizer.step

        def timed_step(*args: Any, **options: Any) -> Any:
            with self._clock():
                return step(*args, **options)

        self.optimizer.step = timed_step  # type: ignore[method-assign]

    def _clock(self) -> Any:
        @contextmanager
        def clock() -> Any:
            begun = time.perf_counter()
            yield
            self.spent["arithmetic"] += time.perf_counter() - begun

        return clock()

    def _backward(self, *parts: Any) -> Any:
        with self._clock():
            return super()._backward(*parts)

    def step(self, batch: Any) -> None:
        begun = time.perf_counter()
        super().step(batch)
        self.spent["steps"].append(time.perf_counter() - begun)

    def save(self, best: bool = False) -> None:
        begun = time.perf_counter()
        super().save(best)
        self.spent["saves"].append(time.perf_counter() - begun)


def measure(name: str, batch: int, steps: int, **changes: Any) -> Timed:
    """A loop that has run."""
    network = build(find_config(name).replace(num_classes=10))
    recipe = Recipe.of(
        ClassificationOptions, name="benchmark", epochs=1, batch_size=batch, mixup=0.0, cutmix=0.0, **changes
    )
    with tempfile.TemporaryDirectory() as folder:
        loop = Timed(Noise(network, steps, batch), recipe, Run(Path(folder), {}), Processes(), Console(quiet=True))
        loop.fit()
        return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--overhead", default="deit_tiny")
    parser.add_argument("--checkpoint", default="deit_base")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    loop = measure(options.overhead, 8, options.steps, checkpoint_every="1000000")
    steps = sum(loop.spent["steps"])
    overhead = 1 - loop.spent["arithmetic"] / steps
    print(f"{options.overhead}, batch 8: {steps / options.steps * 1e3:.0f} ms a step, {overhead:.2%} the loop's own")
    loop = measure(options.checkpoint, 2, 15, checkpoint_every="5", ema=0.999)
    saves = loop.spent["saves"]
    bytes_saved = sum(tensor.numel() * tensor.element_size() for tensor in loop.state().tensors.values())
    print(
        f"{options.checkpoint}, {bytes_saved / 1e9:.2f} GB of weights, average and optimizer: a save holds training up "
        f"for {saves[0]:.2f} s the first time, {statistics.median(saves[1:]):.2f} s after that"
    )
    if options.json:
        figures = {"overhead": overhead, "step_seconds": steps / options.steps, "saves": saves, "bytes": bytes_saved}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
