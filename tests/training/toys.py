"""Toy tasks for the tests of the loop, and the script that runs them in processes of their own.

    python toys.py OUT NAME HOLD [SHARD]        one run, which waits for ever before step HOLD
    torchrun ... toys.py OUT                    every toy with copies and with shards, each cut and resumed

All compute in double precision, so that another order of sums differs by far less than the 1e-6 that tests allow.
"""

from __future__ import annotations

import copy
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import patchloom
from patchloom.console import Console
from patchloom.recipes.recipe import Recipe
from patchloom.training.run import Run

SAMPLES, BATCH, SHARES = 24, 8, (5, 3)  # of a batch, two processes have 5 and 3 samples
STEPS = 8
RECIPE = Recipe(
    name="toy", steps=STEPS, batch_size=BATCH, lr=0.02, warmup_epochs=0.0, weight_decay=0.1, ema=0.8, workers=0,
    eval_every="2", checkpoint_every="3", clip_grad=1.0,
)  # fmt: skip


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Toy(patchloom.Task):
    """Samples 0 to 23 in batches of 8, in another order in every epoch."""

    steps_per_epoch = SAMPLES // BATCH
    metric = patchloom.Metric("error", higher_is_better=False)
    hold: int | None = None  # the step before which to wait for ever

    def share(self, chosen: Tensor) -> Tensor:
        """This process's part of a batch."""
        return chosen if self.processes.count == 1 else chosen.split(SHARES)[self.processes.rank]

    def batches(self, start: int, end: int) -> Generator[Any, None, None]:
        for step in range(start, end):
            if step == self.hold:
                threading.Event().wait()
            epoch, place = divmod(step, self.steps_per_epoch)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            yield self.samples(self.share(order[place * BATCH : (place + 1) * BATCH]))

    def samples(self, chosen: Tensor) -> Any:
        raise NotImplementedError


class Regression(Toy):
    """One network, a target that is its moving average, and a memory of what was predicted for every sample."""

    trained = averaged = ("student",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        student = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)).double()
        self.modules = nn.ModuleDict({"student": student, "target": copy.deepcopy(student)})
        self.inputs, self.wanted = randn(1, SAMPLES, 6), randn(2, SAMPLES, 2)
        self.memory = torch.zeros(SAMPLES, 2, dtype=torch.float64)
        self.latest: list[tuple[Tensor, Tensor]] = []  # samples of the step, and what was predicted for them

    def state(self) -> dict[str, Tensor]:
        return {"memory": self.memory}

    def samples(self, chosen: Tensor) -> Any:
        return {"chosen": chosen, "data": (self.inputs[chosen], self.wanted[chosen])}

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        x, y = batch["data"]
        predicted = self.modules["student"](x)
        with torch.no_grad():
            target = self.modules["target"](x)
        self.latest = [*(self.latest if part else []), (batch["chosen"], predicted.detach())]
        remembered = self.memory[batch["chosen"]]
        return {
            "square": (predicted - y).square().sum(dim=1),
            "target": 0.5 * (predicted - target - 0.1).square().sum(),
            "memory": 0.3 * (predicted - remembered).square().sum(dim=1),
        }

    def after_step(self, step: int) -> None:
        pairs = zip(self.modules["target"].parameters(), self.modules["student"].parameters(), strict=True)
        with torch.no_grad():
            for slow, fast in pairs:
                slow.lerp_(fast, 0.2)
        for part in self.processes.gather(self.latest):  # the memory is the same in every process
            for chosen, predicted in part:
                self.memory[chosen] = 0.5 * self.memory[chosen] + predicted

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        with torch.no_grad():
            return {"error": float(F.mse_loss(modules["student"](self.inputs), self.wanted))}


class Sequences(Toy):
    """The next of five tokens, in sequences of 2 to 25 tokens; every predicted token counts the same."""

    unit = "tokens"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = nn.ModuleDict({"model": nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)).double()})
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.arange(2, 2 + SAMPLES)
        self.tokens = torch.randint(0, 5, (SAMPLES, 26), generator=generator)
        self.tokens[torch.arange(26) >= self.lengths[:, None]] = -1

    def share(self, chosen: Tensor) -> Tensor:
        return super().share(chosen.sort(descending=True).values)  # the long ones to the first process

    def samples(self, chosen: Tensor) -> Any:
        return self.tokens[chosen], self.lengths[chosen]

    def weight(self, batch: Any) -> float:
        return float((batch[1] - 1).sum())

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        tokens, _ = batch
        logits = self.modules["model"](tokens[:, :-1].clamp(min=0))
        wanted = tokens[:, 1:]
        squares = logits.square().mean(dim=-1) * (wanted >= 0)
        return {
            "likelihood": F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum"),
            "size": 0.01 * squares.sum(dim=1),
        }

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        with torch.no_grad():
            logits = modules["model"](self.tokens[:, :-1].clamp(min=0)).flatten(0, 1)
        return {"error": float(F.cross_entropy(logits, self.tokens[:, 1:].flatten(), ignore_index=-1))}


class Blocks(nn.Module):
    """A network with a list of blocks, each of which is sharded on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Pair(Toy):
    """Two networks that learn from a fixed teacher and to agree with each other; only one of them is averaged."""

    trained, averaged = ("left", "right"), ("right",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = {"teacher": nn.Linear(6, 2), "left": Blocks(), "right": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))}
        self.modules = nn.ModuleDict({name: part.double() for name, part in parts.items()})
        self.inputs = randn(1, SAMPLES, 6)

    def samples(self, chosen: Tensor) -> Any:
        return self.inputs[chosen]

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        teacher, left, right = (self.modules[name](batch) for name in ("teacher", "left", "right"))
        return {
            "left": (left - teacher).square().sum(dim=1),
            "right": (right - teacher).abs().sum(),
            "agreement": 0.5 * (left - right).square().sum(dim=1),
        }

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        with torch.no_grad():
            teacher, left, right = (modules[name](self.inputs) for name in ("teacher", "left", "right"))
        return {"error": float(F.mse_loss(right, teacher)), "left_error": float(F.mse_loss(left, teacher))}


class Statistics(Regression):
    """BatchNorm, whose statistics all processes share, beside a queue and a buffer that differ between them."""

    def __init__(self) -> None:
        super().__init__()
        student = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
        student.register_buffer("seen", torch.zeros(2))
        self.modules = nn.ModuleDict({"student": student.double(), "target": copy.deepcopy(student)})
        self.queue = torch.zeros(2, dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """Every process's queue: a checkpoint is written by one of them."""
        return {"queues": torch.stack(self.processes.gather(self.queue))}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.queue.copy_(state["queues"][self.processes.rank])

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        x, y = batch["data"]
        predicted = self.modules["student"](x)
        self.latest = [(batch["chosen"], predicted.detach())]
        return {"square": (predicted - y + 0.1 * self.queue).square().sum(dim=1)}

    def after_step(self, step: int) -> None:
        ((_, predicted),) = self.latest
        self.queue.copy_(0.5 * self.queue + predicted[-1])
        self.modules["student"].seen.copy_(predicted[0])


TOYS: dict[str, type[Toy]] = {"regression": Regression, "sequences": Sequences, "pair": Pair}


def train(task: Toy, out: Path, **changes: Any) -> Run:
    return patchloom.fit(task, out=out, recipe=RECIPE, console=Console(quiet=True), device="cpu", **changes)


def cut(run: Path, to: Path) -> None:
    """A copy of a finished run as a kill would have left it, two steps before its end."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "export")
    for path in (to / "checkpoints").glob(f"step-{STEPS:08d}.*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def train_all(out: Path) -> None:
    """In each of several processes: every toy, plain and sharded, then once more from the checkpoint of step 6."""
    for shard in ("none", "full"):
        for name, make in {**TOYS, **({"statistics": Statistics} if shard == "none" else {})}.items():
            run = out / f"{name}-{shard}"
            whole = train_and_keep(make(), run, shard)
            if whole.processes.is_main_process:
                cut(run, out / f"{run.name}-cut")
            whole.processes.wait()
            train_and_keep(make(), out / f"{run.name}-cut", shard)


def train_and_keep(task: Toy, folder: Path, shard: str) -> Toy:
    """Train, and write down what this process has of its own at the end."""
    train(task, folder, shard=shard)
    if isinstance(task, Statistics):
        buffers = {name: buffer.clone() for name, buffer in task.modules["student"].named_buffers()}
        save_file({**buffers, "queue": task.queue}, folder / f"rank-{task.processes.rank}.safetensors")
    return task


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        train_all(folder)
    else:
        toy = TOYS[sys.argv[2]]()
        toy.hold = int(sys.argv[3])
        train(toy, folder, shard=sys.argv[4] if len(sys.argv) > 4 else "none")
