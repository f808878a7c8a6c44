"""The one loop. It owns time: steps, learning rate, precision, accumulation, clipping, averaging, randomness,
checkpoints, logging, processes, signals. A task owns meaning: batches, losses, metrics, what is exported.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.data.randomness import seed_of
from patchloom.errors import InterruptedWork, PatchloomError, StoppedError
from patchloom.recipes.recipe import Recipe
from patchloom.training.averaging import Average
from patchloom.training.checkpoints import State, parse_interval
from patchloom.training.console import Console, duration
from patchloom.training.optimizers import make_optimizer
from patchloom.training.precision import autocast, check_precision
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate
from patchloom.training.sharding import fill, like, shard_network, whole

Batch = tuple[Tensor, ...]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Task(Protocol):
    """What is learned. Every method is a function of its arguments: a task keeps no state between steps."""

    network: Any  # all that has parameters or state; the loop moves, averages and saves it
    steps_per_epoch: int
    images_per_step: int  # over all processes
    metric: str  # of `evaluate`: larger is better

    def batches(self, start: int, end: int) -> Iterable[Batch]:
        """This process's share of the batches of steps start to end."""
        ...

    def losses(self, network: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        """Named losses, one value an image, (B,) each; their sum is minimised."""
        ...

    def evaluate(self, network: Any) -> dict[str, float]:
        """Metrics over all processes."""
        ...

    def about(self) -> dict[str, Any]:
        """What describes the network in a checkpoint: config, class names, preprocessing."""
        ...


@dataclass
class Counters:
    """The part of a run's state that is not a tensor."""

    step: int = 0
    loss_sum: float = 0.0  # over the images of the current epoch
    loss_images: int = 0
    best: dict[str, Any] = field(default_factory=dict)


class Loop:
    """Trains a task from where it is to the end, or until a signal."""

    def __init__(self, task: Task, recipe: Recipe, run: Run, processes: Processes, console: Console) -> None:
        self.task, self.recipe, self.run, self.processes, self.console = task, recipe, run, processes, console
        check_precision(recipe.precision, processes.device)
        self.network = task.network.to(processes.device)
        self.network.gradient_checkpointing = recipe.gradient_checkpointing
        self.average = Average(self.network, recipe.ema, recipe.ema_warmup) if recipe.ema else None
        if recipe.shard == "full" and processes.count > 1:
            for network in (self.network, *([self.average.model] if self.average else [])):
                shard_network(network, processes)
        self.engine = self._engine()
        self.optimizer = make_optimizer(self.network, recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        self.counters = Counters()
        self.total = recipe.epochs * task.steps_per_epoch
        self.interval = parse_interval(recipe.checkpoint_every)
        self._signal: str | None = None
        self._saved_at = time.monotonic()

    def _engine(self) -> Any:
        """The network as the forward pass calls it."""
        engine: Any = torch.compile(self.network) if self.recipe.compile else self.network
        if self.processes.count == 1 or self.recipe.shard == "full":
            return engine
        return DistributedDataParallel(engine)

    # The state

    def state(self) -> State:
        tensors = {f"model.{name}": tensor for name, tensor in self.whole_tensors(self.network).items()}
        if self.average:
            tensors |= {f"ema.{name}": tensor for name, tensor in self.whole_tensors(self.average.model).items()}
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = whole(value)
        counters = asdict(self.counters)
        counters["loss_sum"] = self.processes.total(self.counters.loss_sum)
        counters["loss_images"] = int(self.processes.total(self.counters.loss_images))
        return State(tensors, {**counters, "scaler": self.scaler.state_dict(), **self.task.about()})

    def whole_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """The state dict, of a sharded network put together again; every process must call it."""
        return {name: whole(tensor) for name, tensor in network.state_dict().items()}

    def restore(self, state: State) -> None:
        """Go on from a checkpoint, whatever the number of processes that wrote it."""
        parts = {part: _under(part, state.tensors) for part in ("model", "ema", "optimizer")}
        fill(self.network, parts["model"])
        if self.average:
            fill(self.average.model, parts["ema"])
        for name, parameter in self.network.named_parameters():
            if found := _under(name, parts["optimizer"]):
                fused = bool(self.optimizer.defaults.get("fused"))  # then its counters are where the parameter is
                self.optimizer.state[parameter] = {key: like(value, parameter, fused) for key, value in found.items()}
        self.scaler.load_state_dict(state.info["scaler"])
        first = self.processes.first
        self.counters = Counters(
            step=state.info["step"],
            loss_sum=state.info["loss_sum"] if first else 0.0,
            loss_images=state.info["loss_images"] if first else 0,
            best=state.info["best"],
        )

    # Time

    def fit(self) -> None:
        """Train to the end. Signals save and raise InterruptedWork."""
        caught = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        previous = {which: signal.signal(which, self._on_signal) for which in caught}
        try:
            self._fit()
        finally:
            for which, handler in previous.items():
                signal.signal(which, handler)

    def _fit(self) -> None:
        start, begun = self.counters.step, time.monotonic()
        self.engine.train()
        for batch in self.task.batches(start, self.total):
            self._step(batch)
            step = self.counters.step
            if step == start + 1:  # the optimizer has its state now
                self._reserve()
            improved = step % self.task.steps_per_epoch == 0 and self._evaluate(begun, start)
            stop, due = self.processes.any(self._signal is not None, self._due())
            if due or improved or stop or step == self.total:
                self._save(improved)
            if stop and step < self.total:
                self.run.checkpoints.wait()
                raise InterruptedWork(
                    f"Stopped by {self._signal or 'a signal'} at step {step} of {self.total}, everything saved; "
                    f"`patchloom resume {self.run.folder}` goes on."
                )
            self._show(begun, start)
        self.run.checkpoints.wait()

    def _reserve(self) -> None:
        state = self.state()
        if self.processes.first:
            self.run.checkpoints.reserve(state.tensors)

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = signal.Signals(number).name

    def _step(self, batch: Batch) -> None:
        step, recipe = self.counters.step, self.recipe
        rate = learning_rate(recipe, step, self.task.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(seed_of(recipe.seed, step, self.processes.rank, "step"))  # stochastic depth
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch, step)
        if self.processes.any(not math.isfinite(loss))[0]:
            self._not_finite(step, rate, loss)
        self.scaler.unscale_(self.optimizer)
        if recipe.clip_grad and recipe.optimizer != "lamb":  # LAMB clips by itself
            nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.counters.step += 1
        self.counters.loss_sum += loss
        self.counters.loss_images += len(batch[0])
        if self.average:
            self.average.update(self.network, self.counters.step)

    def _backward(self, batch: Batch, step: int) -> float:
        """Gradients of the mean over the images of all processes; gives the sum over this process's images."""
        total = 0.0
        share = self.processes.count / self.task.images_per_step  # DDP divides by the number of processes
        count = self.recipe.accumulate
        parts = zip(*(tensor.tensor_split(count) for tensor in batch), strict=True)
        for i, part in enumerate(parts):
            moved = tuple(tensor.to(self.processes.device, non_blocking=True) for tensor in part)
            with self._gradients_stay(i < count - 1):
                with autocast(self.recipe.precision, self.processes.device):
                    losses = self.task.losses(self.engine, moved, step * count + i)
                loss = torch.stack([value.sum() for value in losses.values()]).sum()
                self.scaler.scale(loss * share).backward()
            total += float(loss.detach())
        return total

    def _gradients_stay(self, stay: bool) -> AbstractContextManager[None]:
        """Whether the processes keep their gradients to themselves for now: more of them are to be added up."""
        waits = stay and isinstance(self.engine, DistributedDataParallel)
        return self.engine.no_sync() if waits else nullcontext()

    def _not_finite(self, step: int, rate: float, loss: float) -> None:
        self._save(False)
        self.run.checkpoints.wait()
        raise StoppedError(
            f"The loss is not finite ({loss}) at step {step}, learning rate {rate:.3g}. The state before it is saved. "
            f"Try a smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
        )

    # Evaluations and checkpoints

    def _evaluate(self, begun: float, start: int) -> bool:
        """At the end of an epoch: log, and tell whether the metric is the best so far."""
        counters = self.counters
        images = self.processes.total(counters.loss_images)
        train_loss = self.processes.total(counters.loss_sum) / images
        counters.loss_sum, counters.loss_images = 0.0, 0
        raw = self.task.evaluate(self.network)
        record: dict[str, Any] = {
            "event": "epoch",
            "epoch": counters.step // self.task.steps_per_epoch,
            "step": counters.step,
            "lr": learning_rate(self.recipe, counters.step - 1, self.task.steps_per_epoch),
            "train_loss": train_loss,
            **raw,
        }
        if self.average:
            averaged = self.task.evaluate(self.average.model)
            record |= {f"ema_{name}": value for name, value in averaged.items()}
        if not all(math.isfinite(value) for value in record.values() if isinstance(value, float)):
            self._not_finite(counters.step, record["lr"], record.get("loss", math.nan))
        metric = record[f"ema_{self.task.metric}" if self.average else self.task.metric]
        improved = metric > counters.best.get("value", -math.inf)
        if improved:
            counters.best = {"value": metric, "step": counters.step}
        seconds = time.monotonic() - begun
        record["images_per_second"] = round((counters.step - start) * self.task.images_per_step / seconds, 2)
        record["time"] = round(time.time(), 3)
        if self.processes.first:
            self.run.log(record)
            self.console.say(self._line(record, seconds, start))
        return improved

    def _line(self, record: dict[str, Any], seconds: float, start: int) -> str:
        left = seconds / (self.counters.step - start) * (self.total - self.counters.step)
        shown = "  ".join(
            f"{name} {value:.2%}" if name.endswith("top1") else f"{name} {value:.4f}"
            for name, value in record.items()
            if name in ("train_loss", "loss", "top1", "ema_top1")
        )
        return (
            f"epoch {record['epoch']:>3}/{self.recipe.epochs}  {shown}  lr {record['lr']:.2e}  "
            f"{record['images_per_second']:.0f} images/s  {duration(left)} left"
        )

    def _show(self, begun: float, start: int) -> None:
        step, seconds = self.counters.step, time.monotonic() - begun
        speed = (step - start) * self.task.images_per_step / seconds
        left = duration((self.total - step) * seconds / (step - start))
        mean = self.counters.loss_sum / max(1, self.counters.loss_images)
        self.console.progress(f"step {step}/{self.total}  loss {mean:.4f}  {speed:.0f} images/s  {left} left")

    def _due(self) -> bool:
        unit, number = self.interval
        if unit == "seconds":
            return self.processes.first and time.monotonic() - self._saved_at >= number
        steps = number * (self.task.steps_per_epoch if unit == "epochs" else 1)
        return self.counters.step % steps == 0

    def _save(self, best: bool) -> None:
        state = self.state()
        self._saved_at = time.monotonic()
        if self.processes.first:
            self.run.checkpoints.save(state, best)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def check_batch(recipe: Recipe, images: int, processes: int) -> None:
    """Refuse batches that cannot be shared out."""
    if min(recipe.batch_size, images) < processes * recipe.accumulate:
        raise PatchloomError(
            f"A batch of {min(recipe.batch_size, images)} images cannot be shared by {processes} processes with "
            f"accumulate={recipe.accumulate}."
        )
