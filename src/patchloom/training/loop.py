"""The one loop. It owns time: steps, learning rate, precision, accumulation, clipping, averaging, randomness,
checkpoints, logging, processes, signals. What is learned is a task: see `patchloom.training.task`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.console import Console
from patchloom.data.randomness import seed_of
from patchloom.devices import to_device
from patchloom.errors import InterruptedWork, PatchloomError, StoppedError, errors_in
from patchloom.recipes.intervals import parse_interval, steps_of_interval
from patchloom.recipes.recipe import Recipe
from patchloom.text import describe
from patchloom.training.averaging import Average
from patchloom.training.batchnorm import norm_statistics, synchronise
from patchloom.training.callbacks import Callback
from patchloom.training.checkpoints import State
from patchloom.training.checks import check_equal_states, check_losses, check_metrics, check_setup, check_weight
from patchloom.training.counters import Counters
from patchloom.training.optimizers import make_optimizer
from patchloom.training.precision import autocast, check_precision
from patchloom.training.processes import Processes, data_parallel
from patchloom.training.progress import Progress
from patchloom.training.run import Run
from patchloom.training.schedule import learning_rate, total_steps, warmup_warning, weight_decay
from patchloom.training.sharding import shard_module
from patchloom.training.signals import noted_signals
from patchloom.training.state import TrainingState
from patchloom.training.task import Result, Task


class NotFiniteError(StoppedError):
    """A loss that is NaN or infinite."""


class _StopAsked(Exception):
    """A signal arrived during an evaluation, or between the parts of an accumulated step."""


def _sum(loss: Tensor) -> Tensor:
    """The sum of a loss; of one in half precision in float32, since bf16 keeps three digits and fp16 ends at 65504."""
    return loss.sum(dtype=torch.float32 if loss.dtype.itemsize == 2 else None)


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
        check_setup(task, recipe, callbacks)
        task.to(processes.device)
        self.modules = task.modules
        self._prepare_modules()
        self.average = self._make_average()
        self.sharded = recipe.shard == "full" and processes.count > 1
        if self.sharded:
            for module in (*self.modules.values(), *(self.average.model.values() if self.average else ())):
                shard_module(module, processes)
        self.engine = self._make_engine()
        # After sharding, which replaces parameters: the optimizer must hold the new ones.
        self.optimizer = make_optimizer(self._modules(task.trained), recipe)
        self.tensors = TrainingState(task, self.modules, self.average, self.optimizer)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        self.counters = Counters()
        self.total = total_steps(recipe, task.steps_per_epoch)
        self.checkpoint_interval = parse_interval("checkpoint_every", recipe.checkpoint_every)
        self.evaluation_interval = steps_of_interval("eval_every", recipe.eval_every, task.steps_per_epoch)
        self.progress = Progress(task, recipe, self.total, console)
        self._signal: str | None = None
        self._saved_at = time.monotonic()
        self._start_of_saving = processes.count > 1

    def _prepare_modules(self) -> None:
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
        return data_parallel(engine)

    # The state

    def state(self) -> State:
        """What a checkpoint holds; every process calls it."""
        info = {
            **self.counters.to_json(self.processes),
            "scaler": self.scaler.state_dict(),
            "run": self.run.identity(),
            **self.task.metadata(),
        }
        return State(self.tensors.tensors(), info)

    def restore(self, state: State) -> None:
        """Continue from a checkpoint, whatever the number of processes that wrote it."""
        self.tensors.restore(state.tensors)
        self.scaler.load_state_dict(state.info["scaler"])
        self.counters = Counters.from_json(state.info, self.processes.is_main_process)

    # Time

    def fit(self) -> None:
        """Train to the end. Signals save and raise InterruptedWork."""
        with noted_signals(self._note_signal):
            self._fit()

    def _fit(self) -> None:
        self.progress.begin(self.counters.step)
        if warning := warmup_warning(self.recipe, self.total):
            self.console.say(warning)
        self.train_mode()
        if self.task.evaluates_start and self.counters.step == 0:
            self._evaluate_and_log()
        if self._evaluation_is_due():  # the run was interrupted during evaluation: evaluate again before training on
            self.save(self._evaluate_and_log())
        for batch in self._batches():
            self._step_or_stop(batch)
            if self.counters.step == self.progress.start + 1:  # the optimizer has its state now
                self._reserve()
            improved, evaluated = False, self._evaluation_is_due()
            if evaluated:
                self.save()  # first, so that whatever interrupts the evaluation loses no training
                improved = self._evaluate_and_log()
            stop, due = self.processes.any(self._signal is not None, self._checkpoint_is_due())
            if improved or stop or (due and not evaluated) or self.counters.step == self.total:
                self.save(improved)
            if stop and self.counters.step < self.total:
                self._interrupt()
            self.progress.show(self.counters)
        self.run.checkpoints.wait()

    def train_mode(self) -> None:
        """Put the trained modules into training mode; the task decides about the others."""
        for name in self.task.trained:
            self.modules[name].train()

    def _batches(self) -> Iterator[Any]:
        """The remaining batches. If a process cannot read one, all save and stop; a first one has nothing to save."""
        returned = self.task.batches(self.progress.start, self.total)
        if not isinstance(returned, Generator):
            raise PatchloomError(
                f"batches of the task {type(self.task).__name__} returns {describe(returned)}; it must be a generator: "
                "a function that yields one batch per step."
            )
        with closing(returned) as batches:
            while self.counters.step < self.total:
                try:
                    batch = next(batches)
                except StopIteration:
                    raise PatchloomError(
                        f"The task's batches({self.progress.start}, {self.total}) ended at step {self.counters.step}: "
                        f"it must give one batch for every step."
                    ) from None
                except PatchloomError as error:
                    if self.processes.count == 1 or self.counters.step > self.progress.start:
                        self.processes.total(-math.inf)  # tells the others, which add up weights in `step`
                        self.save()
                    raise self.stopped(error) from error
                yield batch

    def stopped(self, error: Exception) -> PatchloomError:
        """The error for what ended the run, with a checkpoint at the present step."""
        self.run.checkpoints.wait()
        stop, reason = f"Training stopped at step {self.counters.step}", str(error).rstrip(".")
        return PatchloomError(f"{stop}, everything saved: {reason}. {self.run.continuation}")

    def _step_or_stop(self, batch: Any) -> None:
        """Run a step. If its loss is not finite or a signal interrupts it, restore and save the state before it."""
        statistics = norm_statistics(self.modules)  # all that a step changes before its update
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
            f"Stopped by {self._signal or 'a signal'} at step {self.counters.step} of {self.total}, everything saved. "
            f"{self.run.continuation}"
        )

    def _reserve(self) -> None:
        if self.sharded:
            return
        tensors = self.tensors.tensors()  # in every process: a task may gather its state from all of them
        if self.processes.is_main_process:
            self.run.checkpoints.reserve(tensors)

    def _note_signal(self, name: str) -> None:
        self._signal = name

    def step(self, batch: Any) -> None:
        """One update; NotFiniteError before anything but statistics has changed."""
        step, recipe = self.counters.step, self.recipe
        rate = self._set_schedules(step)
        torch.manual_seed(seed_of(recipe.seed, step, self.processes.rank, "step"))  # stochastic depth
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.task.split_batch(batch, recipe.accumulate)
        weight = sum(check_weight(self.task, self.task.weight(part)) for part in parts)
        # The mean is over what all processes count: their shares of a step may differ.
        global_weight = self.processes.total(weight)
        if global_weight == -math.inf:
            self.save()
            raise self.stopped(PatchloomError("another process cannot read its batch"))
        losses, loss = self._backward(parts, step, global_weight)
        # All processes must decide the same: one that continued alone would wait for the others in its next all-reduce.
        if self.processes.any(not math.isfinite(loss))[0]:
            raise NotFiniteError(
                f"The loss is not finite ({loss}) at step {step}, learning rate {rate:.3g}. Start a new run with a "
                f"smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        self._update_weights(step)
        self.counters.count(losses, loss, weight)
        self.progress.count(global_weight)
        # DDP does not share buffers here (see `data_parallel`): each process has the statistics of its own images.
        self.processes.average(buffer for buffer in norm_statistics(self.modules) if buffer.is_floating_point())
        self.task.after_step(self.counters.step)
        if self.average:
            self.average.update(self._modules(self.task.averaged), self.counters.step)
        if self.callbacks and self.processes.is_main_process:
            means = {name: value / (weight or 1.0) for name, value in losses.items()}
            for callback in self.callbacks:
                with errors_in(f"after_step of the callback {type(callback).__name__}"):
                    callback.after_step(self.counters.step, means)

    def _set_schedules(self, step: int) -> float:
        """Give the optimizer the learning rate and weight decay of a step."""
        rate = learning_rate(self.recipe, step, self.task.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
            if self.recipe.weight_decay_end is not None and group["decays"]:
                group["weight_decay"] = weight_decay(self.recipe, step, self.total)
        return rate

    def _update_weights(self, step: int) -> None:
        """Clip the gradients and take a step of the optimizer."""
        # The limit of clipping is in true units, so the factor of the loss scaling is taken out first.
        self.scaler.unscale_(self.optimizer)
        self.task.after_backward(step)
        if self.recipe.clip_grad and self.recipe.optimizer != "lamb":  # LAMB clips by itself
            nn.utils.clip_grad_norm_(self._modules(self.task.trained).parameters(), self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _backward(self, parts: list[Any], step: int, global_weight: float) -> tuple[dict[str, float], float]:
        """Gradients of the mean over what all processes count (`global_weight`); returns the losses of this process,
        summed, by name and in all."""
        sums: dict[str, float] = {}
        total = 0.0
        share = self.processes.count / (global_weight or 1.0)  # DDP divides by the number of processes
        for i, part in enumerate(parts):
            if i and self._signal and self.processes.count == 1:  # nothing but statistics has changed yet
                raise _StopAsked
            moved = to_device(part, self.processes.device)
            with self._no_sync() if i < len(parts) - 1 else nullcontext():
                with autocast(self.recipe.precision, self.processes.device):
                    losses = check_losses(self.task, self.engine(moved, step, i))
                values = torch.stack([_sum(value) for value in losses.values()])
                loss = values.sum()
                self.scaler.scale(loss * share).backward()
            total += float(loss.detach())
            for name, value in zip(losses, values.tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + value
        return sums, total

    def _no_sync(self) -> AbstractContextManager[None]:
        """Postpone the all-reduce of gradients: the accumulated step has further parts."""
        return self.engine.no_sync() if isinstance(self.engine, DistributedDataParallel) else nullcontext()

    # Evaluations and checkpoints

    def _evaluation_is_due(self) -> bool:
        """Whether the present step ends an interval, or the run, and is not evaluated yet."""
        step = self.counters.step
        return step != self.counters.evaluated and (step % self.evaluation_interval == 0 or step == self.total)

    def _evaluate_and_log(self) -> bool:
        """Evaluate and log. Returns whether the metric is the best so far."""
        counters, per_epoch = self.counters, self.task.steps_per_epoch
        loss_sum, weight, losses = counters.totals(self.processes)
        weight = weight or 1.0  # a batch may hold nothing to count, such as an image without instances
        epochs = counters.step / per_epoch
        record: dict[str, Any] = {
            "event": "epoch",
            "epoch": int(epochs) if epochs.is_integer() else round(epochs, 4),
            "step": counters.step,
        }
        if counters.step:
            # The counter already points at the next update; this is the rate of the last one.
            record["lr"] = learning_rate(self.recipe, counters.step - 1, per_epoch)
            record["train_loss"] = loss_sum / weight
            record["losses"] = {name: value / weight for name, value in losses.items()}
        record |= self._evaluate(self.modules)
        if self.average:
            record |= {f"ema_{name}": value for name, value in self._evaluate(self.result_modules()).items()}
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise StoppedError(
                f"The evaluation at step {counters.step} is NaN or infinite ({', '.join(bad)}): the weights are "
                f"damaged. Start a new run with a smaller lr, more warmup_epochs, clip_grad=1, or precision=float32."
            )
        counters.begin_interval()
        improved = counters.note_best(self.task.metric, record, averaged=self.average is not None)
        record[f"{self.task.unit}_per_second"] = round(self.progress.speed(), 2)
        record["time"] = round(time.time(), 3)
        if self.processes.is_main_process:
            self.run.log(record)
            self.console.say(self.progress.line(record))
            for callback in self.callbacks:
                with errors_in(f"after_evaluation of the callback {type(callback).__name__}"):
                    callback.after_evaluation(record)
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
            return check_metrics(self.task, self.task.evaluate(modules, stop_if_asked))
        except _StopAsked:
            self._interrupt()
        except StoppedError:
            raise
        except PatchloomError as error:
            raise self.stopped(error) from error
        finally:
            self.train_mode()  # whatever the task did: a resumed run begins in this mode too

    def _checkpoint_is_due(self) -> bool:
        unit, number = self.checkpoint_interval
        if unit == "seconds":  # the main process's clock decides for all: see the `any` of `_fit`
            return self.processes.is_main_process and time.monotonic() - self._saved_at >= number
        steps = number * (self.task.steps_per_epoch if unit == "epochs" else 1)
        return self.counters.step % steps == 0

    def save(self, best: bool = False) -> None:
        """Write a checkpoint in the background; every process calls it."""
        state = self.state()
        if self._start_of_saving:  # only the main process's `Task.state` is written
            self._start_of_saving = False
            check_equal_states(self.task, self.processes)
        self._saved_at = time.monotonic()
        if self.sharded or self.processes.is_main_process:
            self.run.checkpoints.save(state, best)
