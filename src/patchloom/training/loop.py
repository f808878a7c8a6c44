"""The one loop. It owns time: steps, learning rate, precision, accumulation, clipping, averaging, randomness,
checkpoints, logging, processes, signals. A task owns meaning: batches, losses, metrics, what is exported.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.console import Console, duration
from patchloom.data.randomness import seed_of
from patchloom.devices import to_device
from patchloom.errors import InterruptedWork, PatchloomError, StoppedError
from patchloom.recipes.recipe import Recipe
from patchloom.training.averaging import Average
from patchloom.training.batchnorm import synchronise
from patchloom.training.checkpoints import State, parse_interval
from patchloom.training.optimizers import make_optimizer
from patchloom.training.precision import autocast, check_precision
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate
from patchloom.training.sharding import fill, like, shard_network

Batch = tuple[Tensor, ...]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NotFiniteError(StoppedError):
    """A loss that is not a number, or infinite."""


class _StopAsked(Exception):
    """A signal came during an evaluation, or between the parts of an accumulated step."""


class Task(Protocol):
    """What is learned. Every method is a function of its arguments: a task keeps no state between steps."""

    network: Any  # all that has parameters or state; the loop moves, averages and saves it
    steps_per_epoch: int
    images_per_step: int  # over all processes
    metric: str  # of `evaluate`: larger is better

    def batches(self, start: int, end: int) -> Generator[Batch, None, None]:
        """This process's share of the batches of steps start to end."""
        ...

    def losses(self, network: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        """Named losses, one value an image, (B,) each; their sum is minimised."""
        ...

    def evaluate(self, network: Any, after_batch: Callable[[], None]) -> dict[str, Any]:
        """Metrics over all processes, each of which calls `after_batch` equally often; what it raises goes through."""
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
    evaluated: int = 0  # the step of the last evaluation
    best: dict[str, Any] = field(default_factory=dict)


class Loop:
    """Trains a task from where it is to the end, or until a signal."""

    def __init__(self, task: Task, recipe: Recipe, run: Run, processes: Processes, console: Console) -> None:
        self.task, self.recipe, self.run, self.processes, self.console = task, recipe, run, processes, console
        check_precision(recipe.precision, processes.device)
        self.network = task.network.to(processes.device)
        if recipe.sync_batchnorm and processes.count > 1:
            synchronise(self.network)
        self.network.gradient_checkpointing = recipe.gradient_checkpointing
        self.average = Average(self.network, recipe.ema, recipe.ema_warmup) if recipe.ema else None
        self.sharded = recipe.shard == "full" and processes.count > 1
        if self.sharded:
            for network in (self.network, *([self.average.model] if self.average else [])):
                shard_network(network, processes)
        self.engine = self._engine()
        self.optimizer = make_optimizer(self.network, recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        self.counters = Counters()
        self.total = recipe.epochs * task.steps_per_epoch
        self.interval = parse_interval(recipe.checkpoint_every)
        self._signal: str | None = None
        self._saved_at = self._begun = time.monotonic()
        self._start = 0  # the step that this process began at

    def _engine(self) -> Any:
        """The network as the forward pass calls it."""
        engine: Any = torch.compile(self.network) if self.recipe.compile else self.network
        if self.processes.count == 1 or self.sharded:
            return engine
        return DistributedDataParallel(engine)

    # The state

    def state(self) -> State:
        """Of a sharded network every process has its part, of any other the whole; all call it."""
        counters = asdict(self.counters)
        counters["loss_sum"] = self.processes.total(self.counters.loss_sum)
        counters["loss_images"] = int(self.processes.total(self.counters.loss_images))
        info = {**counters, "scaler": self.scaler.state_dict(), "run": self.run.identity(), **self.task.about()}
        return State(self._tensors(), info)

    def _tensors(self) -> dict[str, Tensor]:
        networks = {"model": self.network, **({"ema": self.average.model} if self.average else {})}
        tensors = {
            f"{part}.{name}": tensor
            for part, network in networks.items()
            for name, tensor in network.state_dict().items()
        }
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def empty(self, name: str, shape: torch.Size) -> Tensor | None:
        """What a tensor of `state` is read into, sharded as it is here; None for what this loop has not."""
        part, _, name = name.partition(".")
        if part == "optimizer":
            owner = dict(self.network.named_parameters())[name.rpartition(".")[0]]
            return torch.zeros_like(owner) if owner.shape == shape else torch.zeros(shape)
        if part == "model":
            return torch.zeros_like(self.network.state_dict()[name])
        return torch.zeros_like(self.average.model.state_dict()[name]) if self.average else None

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
            evaluated=state.info["evaluated"],
            best=state.info["best"],
        )

    # Time

    def fit(self) -> None:
        """Train to the end. Signals save and raise InterruptedWork."""
        caught = list(_SIGNALS) if threading.current_thread() is threading.main_thread() else []
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and caught:  # under nohup
            caught.remove(signal.SIGHUP)
        previous = {which: signal.signal(which, self._on_signal) for which in caught}
        try:
            self._fit()
        finally:
            for which, handler in previous.items():
                signal.signal(which, handler)

    def _fit(self) -> None:
        self._start, self._begun = self.counters.step, time.monotonic()
        self.engine.train()
        if self._at_end_of_epoch():  # one that was stopped in its evaluation
            self.save(self._end_epoch())
        for batch in self._batches():
            self._step_or_stop(batch)
            if self.counters.step == self._start + 1:  # the optimizer has its state now
                self._reserve()
            improved, ended = False, self._at_end_of_epoch()
            if ended:
                self.save()  # first: whatever ends an evaluation, it does not cost an epoch
                improved = self._end_epoch()
            stop, due = self.processes.any(self._signal is not None, self._due())
            if improved or stop or (due and not ended) or self.counters.step == self.total:
                self.save(improved)
            if stop and self.counters.step < self.total:
                self._interrupt()
            self._show()
        self.run.checkpoints.wait()

    def _batches(self) -> Iterator[Batch]:
        """The batches that are left; where one cannot be had, a process on its own saves what it learned."""
        with closing(self.task.batches(self._start, self.total)) as batches:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except PatchloomError as error:
                    alone = self.processes.count == 1
                    if alone:
                        self.save()
                    raise self.stopped(error, alone) from error
                yield batch

    def stopped(self, error: PatchloomError, saved: bool = True) -> PatchloomError:
        """What to tell of input that ended the run; `saved`: at the present step."""
        self.run.checkpoints.wait()
        where = f"step {self.counters.step}{', everything saved' if saved else ''}"
        reason = str(error).rstrip(".")
        return PatchloomError(
            f"Training stopped at {where}: {reason}. `patchloom resume {quote(str(self.run.folder))}` continues it."
        )

    def _step_or_stop(self, batch: Batch) -> None:
        """A step; one whose loss is not finite, or that a signal cut, leaves the state as it was before, and saved."""
        before = [buffer.clone() for buffer in self.network.buffers()]
        try:
            self.step(batch)
        except (NotFiniteError, _StopAsked) as error:
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
            self.save()
            self.run.checkpoints.wait()
            if isinstance(error, _StopAsked):
                self._interrupt()
            raise StoppedError(f"{error} The state before it is saved.") from error
        if self.processes.count == 1:
            self.run.checkpoints.check()

    def _interrupt(self) -> NoReturn:
        self.run.checkpoints.wait()
        raise InterruptedWork(
            f"Stopped by {self._signal or 'a signal'} at step {self.counters.step} of {self.total}, everything saved; "
            f"`patchloom resume {quote(str(self.run.folder))}` continues it."
        )

    def _reserve(self) -> None:
        if self.processes.first and not self.sharded:
            self.run.checkpoints.reserve(self._tensors())

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = signal.Signals(number).name

    def step(self, batch: Batch) -> None:
        """One step of the optimizer; NotFiniteError before anything but statistics has changed."""
        step, recipe = self.counters.step, self.recipe
        rate = learning_rate(recipe, step, self.task.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
        torch.manual_seed(seed_of(recipe.seed, step, self.processes.rank, "step"))  # stochastic depth
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch, step)
        if self.processes.any(not math.isfinite(loss))[0]:
            raise NotFiniteError(
                f"The loss is not finite ({loss}) at step {step}, learning rate {rate:.3g}. Start a new run with a "
                f"smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        self.scaler.unscale_(self.optimizer)
        if recipe.clip_grad and recipe.optimizer != "lamb":  # LAMB clips by itself
            nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.counters.step += 1
        self.counters.loss_sum += loss
        self.counters.loss_images += len(batch[0])
        self.processes.average(buffer for buffer in self.network.buffers() if buffer.is_floating_point())
        if self.average:
            self.average.update(self.network, self.counters.step)

    def _backward(self, batch: Batch, step: int) -> float:
        """Gradients of the mean over the images of all processes; gives the sum over this process's images."""
        total = 0.0
        share = self.processes.count / self.task.images_per_step  # DDP divides by the number of processes
        count = self.recipe.accumulate
        parts = zip(*(tensor.tensor_split(count) for tensor in batch), strict=True)
        for i, part in enumerate(parts):
            if i and self._signal and self.processes.count == 1:  # nothing but statistics has changed yet
                raise _StopAsked
            moved = to_device(part, self.processes.device)
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

    # Evaluations and checkpoints

    def _at_end_of_epoch(self) -> bool:
        """Whether an epoch is over and not evaluated yet."""
        step = self.counters.step
        return step % self.task.steps_per_epoch == 0 and step != self.counters.evaluated

    def _end_epoch(self) -> bool:
        """Evaluate, log, and tell whether the metric is the best so far."""
        counters = self.counters
        record: dict[str, Any] = {
            "event": "epoch",
            "epoch": counters.step // self.task.steps_per_epoch,
            "step": counters.step,
            "lr": learning_rate(self.recipe, counters.step - 1, self.task.steps_per_epoch),
            "train_loss": self.processes.total(counters.loss_sum) / self.processes.total(counters.loss_images),
            **self._evaluate(self.network),
        }
        if self.average:
            record |= {f"ema_{name}": value for name, value in self._evaluate(self.average.model).items()}
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise StoppedError(
                f"The evaluation at step {counters.step} is NaN or infinite ({', '.join(bad)}): the weights are "
                f"damaged. Start a new run with a smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        counters.loss_sum, counters.loss_images, counters.evaluated = 0.0, 0, counters.step
        # without held-out images there is no metric, and the newest checkpoint is the best
        metric = record.get(f"ema_{self.task.metric}" if self.average else self.task.metric, float(counters.step))
        improved = metric > counters.best.get("value", -math.inf)
        if improved:
            counters.best = {"value": metric, "step": counters.step}
        record["images_per_second"] = round(self._speed(), 2)
        record["time"] = round(time.time(), 3)
        if self.processes.first:
            self.run.log(record)
            self.console.say(self._line(record))
        return improved

    def _evaluate(self, network: Any) -> dict[str, Any]:
        """The task's metrics. A signal does not wait for them: they are computed when the run is resumed."""

        def stop_if_asked() -> None:
            if self.processes.any(self._signal is not None)[0]:
                raise _StopAsked

        try:
            return self.task.evaluate(network, stop_if_asked)
        except _StopAsked:
            self._interrupt()
        except StoppedError:
            raise
        except PatchloomError as error:
            raise self.stopped(error) from error

    def _speed(self) -> float:
        """Images a second since this process began."""
        steps = self.counters.step - self._start
        return steps * self.task.images_per_step / max(time.monotonic() - self._begun, 1e-9)

    def _left(self) -> str:
        images = (self.total - self.counters.step) * self.task.images_per_step
        return f"{duration(images / speed)} left" if (speed := self._speed()) else "beginning"

    def _line(self, record: dict[str, Any]) -> str:
        shown = "  ".join(
            f"{name} {value:.2%}" if name.endswith("top1") else f"{name} {value:.4f}"
            for name, value in record.items()
            if name in ("train_loss", "loss", "top1", "ema_top1")
        )
        return (
            f"epoch {record['epoch']:>3}/{self.recipe.epochs}  {shown}  lr {record['lr']:.2e}  "
            f"{record['images_per_second']:.0f} images/s  {self._left()}"
        )

    def _show(self) -> None:
        mean = self.counters.loss_sum / max(1, self.counters.loss_images)
        step = f"step {self.counters.step}/{self.total}"
        self.console.progress(f"{step}  loss {mean:.4f}  {self._speed():.0f} images/s  {self._left()}")

    def _due(self) -> bool:
        unit, number = self.interval
        if unit == "seconds":
            return self.processes.first and time.monotonic() - self._saved_at >= number
        steps = number * (self.task.steps_per_epoch if unit == "epochs" else 1)
        return self.counters.step % steps == 0

    def save(self, best: bool = False) -> None:
        """Write a checkpoint in the background; every process calls it."""
        state = self.state()
        self._saved_at = time.monotonic()
        if self.sharded or self.processes.first:
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
