"""The one loop. It owns time: steps, learning rate, precision, accumulation, clipping, averaging, randomness,
checkpoints, logging, processes, signals. What is learned is a task: see `patchloom.training.task`.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.console import Console, duration
from patchloom.data.randomness import seed_of
from patchloom.devices import to_device
from patchloom.errors import InterruptedWork, PatchloomError, StoppedError
from patchloom.recipes.recipe import Recipe
from patchloom.training.averaging import Average
from patchloom.training.batchnorm import norm_statistics, synchronise
from patchloom.training.checkpoints import State, parse_interval
from patchloom.training.optimizers import make_optimizer
from patchloom.training.precision import autocast, check_precision
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate, total_steps, weight_decay
from patchloom.training.sharding import fill, like, shard_module
from patchloom.training.task import Result, Task, split

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EMA, _OPTIMIZER, _STATE = "ema", "optimizer", "state"  # parts of a checkpoint, beside the names of the modules


class NotFiniteError(StoppedError):
    """A loss that is NaN or infinite."""


class _StopAsked(Exception):
    """A signal came during an evaluation, or between the parts of an accumulated step."""


class Callback:
    """A user's own code in a run: subclass it and define one of the methods. The main process calls them."""

    def after_step(self, step: int, losses: Mapping[str, float]) -> None:
        """After update `step`, with the losses of this process's batch, each a mean over the batch."""

    def after_evaluation(self, record: Mapping[str, Any]) -> None:
        """After an evaluation, with the record that log.jsonl has."""


@dataclass
class Counters:
    """The part of a run's state that is not a tensor."""

    step: int = 0
    loss_sum: float = 0.0  # since the last evaluation, over images, tokens or whatever the task counts
    losses: dict[str, float] = field(default_factory=dict)  # the same by name
    weight: float = 0.0  # what was counted meanwhile
    evaluated: int = 0  # the step of the last evaluation
    best: dict[str, Any] = field(default_factory=dict)


class _Losses(nn.Module):
    """The task's losses as the forward pass of one module, which is what data parallelism wraps."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.learned = task.modules
        self.task = task

    def forward(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        return self.task.losses(batch, step, part)


class Loop:
    """Trains a task from where it is to the end, or until a signal."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        run: Run,
        processes: Processes,
        console: Console,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.task, self.recipe, self.run, self.processes, self.console = task, recipe, run, processes, console
        self.callbacks = callbacks
        check_precision(recipe.precision, processes.device)
        self.modules = task.modules.to(processes.device)
        self._prepare_modules()
        self.average = self._make_average()
        self.sharded = recipe.shard == "full" and processes.count > 1
        if self.sharded:
            for module in (*self.modules.values(), *(self.average.model.values() if self.average else ())):
                shard_module(module, processes)
        self.engine = self._make_engine()
        self.optimizer = make_optimizer(self._modules(task.trained), recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        self.counters = Counters()
        self.total = total_steps(recipe, task.steps_per_epoch)
        self.checkpoint_interval = parse_interval("checkpoint_every", recipe.checkpoint_every)
        self.evaluation_interval = self._steps_between_evaluations()
        self._signal: str | None = None
        self._saved_at = self._begun = time.monotonic()
        self._start = 0  # the step that this process began at
        self._processed = 0.0  # images, tokens, ... of all processes since then

    def _prepare_modules(self) -> None:
        if taken := {_EMA, _OPTIMIZER, _STATE} & set(self.modules):
            raise ValueError(f"modules of a task cannot be called {', '.join(sorted(taken))}")
        for name, module in self.modules.items():
            if name not in self.task.trained:
                module.requires_grad_(False)
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = self.recipe.gradient_checkpointing  # type: ignore[assignment]
        if self.recipe.sync_batchnorm and self.processes.count > 1:
            synchronise(self.modules)
        if self.recipe.compile:
            for name in self.task.trained:
                self.modules[name].compile()

    def _modules(self, names: Collection[str]) -> nn.ModuleDict:
        return nn.ModuleDict({name: self.modules[name] for name in names})

    def _make_average(self) -> Average | None:
        if not self.recipe.ema or not self.task.averaged:
            return None
        return Average(self._modules(self.task.averaged), self.recipe.ema, self.recipe.ema_warmup)

    def _make_engine(self) -> nn.Module:
        """The task's losses, wrapped for data parallelism."""
        engine = _Losses(self.task)
        if self.processes.count == 1 or self.sharded:
            return engine
        # buffers: statistics are averaged after every step, and memories may differ from process to process
        return DistributedDataParallel(engine, broadcast_buffers=False)

    def _steps_between_evaluations(self) -> int:
        unit, number = parse_interval("eval_every", self.recipe.eval_every)
        if unit == "seconds":
            raise PatchloomError(
                f"eval_every is a number of epochs (1 epoch) or steps (500), not {self.recipe.eval_every!r}."
            )
        return int(number) * (self.task.steps_per_epoch if unit == "epochs" else 1)

    # The state

    def state(self) -> State:
        """Of sharded modules every process has its part, of any other the whole; all call it."""
        counters = asdict(self.counters)
        counters["loss_sum"], counters["weight"], counters["losses"] = self._loss_totals()
        info = {**counters, "scaler": self.scaler.state_dict(), "run": self.run.identity(), **self.task.metadata()}
        return State(self._tensors(), info)

    def _loss_totals(self) -> tuple[float, float, dict[str, float]]:
        """The sum of losses, what was counted, and the sums by name, over all processes."""
        total, counters = self.processes.total, self.counters
        names = sorted({name for part in self.processes.gather(list(counters.losses)) for name in part})
        by_name = {name: total(counters.losses.get(name, 0.0)) for name in names}
        return total(counters.loss_sum), total(counters.weight), by_name

    def _tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.modules.state_dict())
        if self.average:
            tensors |= {f"{_EMA}.{name}": tensor for name, tensor in self.average.model.state_dict().items()}
        for name, parameter in self.modules.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}.{name}.{key}"] = value
        return tensors | {f"{_STATE}.{name}": tensor for name, tensor in self.task.state().items()}

    def empty(self, name: str, shape: torch.Size) -> Tensor | None:
        """What a tensor of `state` is read into, sharded as it is here; None for what this loop does not have."""
        name = self._current_name(name)
        part, _, rest = name.partition(".")
        if part == _OPTIMIZER:
            owner = dict(self.modules.named_parameters())[rest.rpartition(".")[0]]
            return torch.zeros_like(owner) if owner.shape == shape else torch.zeros(shape)
        if part == _EMA:
            return torch.zeros_like(self.average.model.state_dict()[rest]) if self.average else None
        if part == _STATE:
            return torch.zeros_like(self.task.state()[rest])
        return torch.zeros_like(self.modules.state_dict()[name])

    def _current_name(self, name: str) -> str:
        """The name of a tensor in a checkpoint. Version 0.1 knew one module, and left its name out of averages and
        optimizer states."""
        part, _, rest = name.partition(".")
        if part not in (_EMA, _OPTIMIZER) or rest.partition(".")[0] in self.modules:
            return name
        return f"{part}.{next(iter(self.modules))}.{rest}"

    def restore(self, state: State) -> None:
        """Continue from a checkpoint, whatever the number of processes that wrote it."""
        tensors = {self._current_name(name): tensor for name, tensor in state.tensors.items()}
        parts = {part: _under(part, tensors) for part in (_EMA, _OPTIMIZER, _STATE)}
        own = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in parts}
        fill(self.modules, own)
        if self.average:
            fill(self.average.model, parts[_EMA])
        for name, parameter in self.modules.named_parameters():
            if found := _under(name, parts[_OPTIMIZER]):
                fused = bool(self.optimizer.defaults.get("fused"))  # then its counters are where the parameter is
                self.optimizer.state[parameter] = {key: like(value, parameter, fused) for key, value in found.items()}
        self.task.load_state(parts[_STATE])
        self.scaler.load_state_dict(state.info["scaler"])
        self._restore_counters(state.info)

    def _restore_counters(self, info: Mapping[str, Any]) -> None:
        """The sums over all processes go to the first one, so that they are counted once."""
        sums = {
            "loss_sum": info["loss_sum"],
            "losses": dict(info.get("losses", {})),
            "weight": info["weight"] if "weight" in info else info["loss_images"],
        }
        kept = {"step": info["step"], "evaluated": info["evaluated"], "best": info["best"]}
        self.counters = Counters(**kept, **(sums if self.processes.is_main_process else {}))

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
        self.train_mode()
        if self._evaluation_is_due():  # the run was interrupted during evaluation: evaluate again before training on
            self.save(self._evaluate_and_log())
        for batch in self._batches():
            self._step_or_stop(batch)
            if self.counters.step == self._start + 1:  # the optimizer has its state now
                self._reserve()
            improved, evaluated = False, self._evaluation_is_due()
            if evaluated:
                self.save()  # first: whatever ends an evaluation, it does not cost what was learned before it
                improved = self._evaluate_and_log()
            stop, due = self.processes.any(self._signal is not None, self._checkpoint_is_due())
            if improved or stop or (due and not evaluated) or self.counters.step == self.total:
                self.save(improved)
            if stop and self.counters.step < self.total:
                self._interrupt()
            self._show()
        self.run.checkpoints.wait()

    def train_mode(self) -> None:
        """Put the trained modules into training mode; the task decides about the others."""
        for name in self.task.trained:
            self.modules[name].train()

    def _batches(self) -> Iterator[Any]:
        """The batches that are left; where one cannot be had, a process on its own saves what it learned."""
        with closing(self.task.batches(self._start, self.total)) as batches:
            while self.counters.step < self.total:
                try:
                    batch = next(batches)
                except StopIteration:
                    raise PatchloomError(
                        f"The task's batches({self._start}, {self.total}) ended at step {self.counters.step}: it must "
                        f"give one batch for every step."
                    ) from None
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

    def _step_or_stop(self, batch: Any) -> None:
        """A step; one whose loss is not finite, or that a signal cut, leaves the state as it was before, and saved."""
        statistics = norm_statistics(self.modules)  # nothing else changes before an update
        before = [buffer.clone() for buffer in statistics]
        try:
            self.step(batch)
        except (NotFiniteError, _StopAsked) as error:
            for buffer, value in zip(statistics, before, strict=True):
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
        if self.sharded:
            return
        tensors = self._tensors()  # in every process: a task may gather its state from all of them
        if self.processes.is_main_process:
            self.run.checkpoints.reserve(tensors)

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = signal.Signals(number).name

    def step(self, batch: Any) -> None:
        """One update; NotFiniteError before anything but statistics has changed."""
        step, recipe = self.counters.step, self.recipe
        rate = self._set_schedules(step)
        torch.manual_seed(seed_of(recipe.seed, step, self.processes.rank, "step"))  # stochastic depth
        self.optimizer.zero_grad(set_to_none=True)
        parts = split(batch, recipe.accumulate)
        weight = sum(self.task.weight(part) for part in parts)
        everywhere = self.processes.total(weight)
        losses, loss = self._backward(parts, step, everywhere)
        if self.processes.any(not math.isfinite(loss))[0]:
            raise NotFiniteError(
                f"The loss is not finite ({loss}) at step {step}, learning rate {rate:.3g}. Start a new run with a "
                f"smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        self.scaler.unscale_(self.optimizer)
        if recipe.clip_grad and recipe.optimizer != "lamb":  # LAMB clips by itself
            nn.utils.clip_grad_norm_(self._modules(self.task.trained).parameters(), recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._count(losses, loss, weight, everywhere)
        self.processes.average(buffer for buffer in norm_statistics(self.modules) if buffer.is_floating_point())
        self.task.after_step(self.counters.step)
        if self.average:
            self.average.update(
                nn.ModuleDict({name: self.modules[name] for name in self.task.averaged}), self.counters.step
            )
        if self.callbacks and self.processes.is_main_process:
            means = {name: value / (weight or 1.0) for name, value in losses.items()}
            for callback in self.callbacks:
                callback.after_step(self.counters.step, means)

    def _set_schedules(self, step: int) -> float:
        """Give the optimizer the learning rate and weight decay of a step."""
        rate = learning_rate(self.recipe, step, self.task.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
            if self.recipe.weight_decay_end is not None and group["decays"]:
                group["weight_decay"] = weight_decay(self.recipe, step, self.total)
        return rate

    def _backward(self, parts: list[Any], step: int, everywhere: float) -> tuple[dict[str, float], float]:
        """Gradients of the mean over what all processes count (`everywhere`); gives the sums of this process, by name
        and in all."""
        sums: dict[str, float] = {}
        total = 0.0
        share = self.processes.count / (everywhere or 1.0)  # DDP divides by the number of processes
        for i, part in enumerate(parts):
            if i and self._signal and self.processes.count == 1:  # nothing but statistics has changed yet
                raise _StopAsked
            moved = to_device(part, self.processes.device)
            with self._gradients_stay(i < len(parts) - 1):
                with autocast(self.recipe.precision, self.processes.device):
                    losses = self.engine(moved, step, i)
                values = torch.stack([value.sum() for value in losses.values()])
                loss = values.sum()
                self.scaler.scale(loss * share).backward()
            total += float(loss.detach())
            for name, value in zip(losses, values.tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + value
        return sums, total

    def _count(self, losses: Mapping[str, float], loss: float, weight: float, everywhere: float) -> None:
        counters = self.counters
        counters.step += 1
        counters.loss_sum += loss
        counters.weight += weight
        for name, value in losses.items():
            counters.losses[name] = counters.losses.get(name, 0.0) + value
        self._processed += everywhere

    def _gradients_stay(self, stay: bool) -> AbstractContextManager[None]:
        """Whether the processes keep their gradients to themselves for now: more of them are to be added up."""
        if stay and isinstance(self.engine, DistributedDataParallel):
            return self.engine.no_sync()
        return nullcontext()

    # Evaluations and checkpoints

    def _evaluation_is_due(self) -> bool:
        """Whether the present step ends an interval, or the run, and is not evaluated yet."""
        step = self.counters.step
        return step != self.counters.evaluated and (step % self.evaluation_interval == 0 or step == self.total)

    def _evaluate_and_log(self) -> bool:
        """Evaluate, log, and tell whether the metric is the best so far."""
        counters, per_epoch = self.counters, self.task.steps_per_epoch
        loss_sum, weight, losses = self._loss_totals()
        weight = weight or 1.0  # a batch may hold nothing to count, such as an image without instances
        epochs = counters.step / per_epoch
        record: dict[str, Any] = {
            "event": "epoch",
            "epoch": int(epochs) if epochs.is_integer() else round(epochs, 4),
            "step": counters.step,
            "lr": learning_rate(self.recipe, counters.step - 1, per_epoch),
            "train_loss": loss_sum / weight,
            "losses": {name: value / weight for name, value in losses.items()},
            **self._evaluate(self.modules),
        }
        if self.average:
            record |= {f"ema_{name}": value for name, value in self._evaluate(self.result_modules()).items()}
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise StoppedError(
                f"The evaluation at step {counters.step} is NaN or infinite ({', '.join(bad)}): the weights are "
                f"damaged. Start a new run with a smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        counters.loss_sum, counters.losses, counters.weight, counters.evaluated = 0.0, {}, 0.0, counters.step
        improved = self._note_best(record)
        record[f"{self.task.unit}_per_second"] = round(self._speed(), 2)
        record["time"] = round(time.time(), 3)
        if self.processes.is_main_process:
            self.run.log(record)
            self.console.say(self._line(record))
            for callback in self.callbacks:
                callback.after_evaluation(record)
        return improved

    def _note_best(self, record: Mapping[str, Any]) -> bool:
        """Whether the record's metric is the best so far; without one, the newest checkpoint is the best."""
        counters, metric = self.counters, self.task.metric
        value = record.get(f"ema_{metric.name}" if self.average else metric.name) if metric else None
        if metric is None or value is None:
            value, improved = float(counters.step), True
        else:
            improved = metric.improves(value, counters.best.get("value"))
        if improved:
            counters.best = {"value": value, "step": counters.step}
        return improved

    def result_modules(self) -> nn.ModuleDict:
        """The modules that are the result: averaged ones in place of those that the average covers."""
        if self.average is None:
            return self.modules
        return nn.ModuleDict({**self.modules, **self.average.model})

    def result(self) -> Result:
        """What the task exports and reports."""
        return Result(self.result_modules(), self.average is not None, self.counters.step, self.counters.best)

    def _evaluate(self, modules: nn.ModuleDict) -> dict[str, Any]:
        """The task's metrics. A signal does not wait for them: they are computed when the run is resumed."""

        def stop_if_asked() -> None:
            if self.processes.any(self._signal is not None)[0]:
                raise _StopAsked

        for name in self.task.trained:
            modules[name].eval()
        try:
            return self.task.evaluate(modules, stop_if_asked)
        except _StopAsked:
            self._interrupt()
        except StoppedError:
            raise
        except PatchloomError as error:
            raise self.stopped(error) from error
        finally:
            self.train_mode()  # whatever the task did: a resumed run begins in this mode too

    def _speed(self) -> float:
        """Images (or tokens) per second since this process began."""
        return self._processed / max(time.monotonic() - self._begun, 1e-9)

    def _left(self) -> str:
        steps = self.counters.step - self._start
        if not steps:
            return "beginning"
        return f"{duration((self.total - self.counters.step) * (time.monotonic() - self._begun) / steps)} left"

    def _line(self, record: Mapping[str, Any]) -> str:
        metric = self.task.metric
        shown = [f"{name} {record[name]:.4f}" for name in ("train_loss", "loss") if name in record]
        if metric is not None:
            names = (metric.name, f"ema_{metric.name}")
            shown += [f"{name} {metric.text(record[name])}" for name in names if name in record and name != "loss"]
        done = f"epoch {record['epoch']:>3}/{self.recipe.epochs}"
        if self.recipe.steps is not None:
            done = f"step {record['step']}/{self.total}"
        return (
            f"{done}  {'  '.join(shown)}  lr {record['lr']:.2e}  {self._speed():.0f} {self.task.unit}/s  {self._left()}"
        )

    def _show(self) -> None:
        mean = self.counters.loss_sum / max(1.0, self.counters.weight)
        step = f"step {self.counters.step}/{self.total}"
        self.console.progress(f"{step}  loss {mean:.4f}  {self._speed():.0f} {self.task.unit}/s  {self._left()}")

    def _checkpoint_is_due(self) -> bool:
        unit, number = self.checkpoint_interval
        if unit == "seconds":
            return self.processes.is_main_process and time.monotonic() - self._saved_at >= number
        steps = number * (self.task.steps_per_epoch if unit == "epochs" else 1)
        return self.counters.step % steps == 0

    def save(self, best: bool = False) -> None:
        """Write a checkpoint in the background; every process calls it."""
        state = self.state()
        self._saved_at = time.monotonic()
        if self.sharded or self.processes.is_main_process:
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
