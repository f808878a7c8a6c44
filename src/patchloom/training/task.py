"""The contract between the loop and what is learned.

The loop owns time: steps, learning rate, precision, accumulation, averaging, checkpoints, logging, processes, signals.
A task owns meaning: modules, batches, losses, evaluation, what is exported and reported. Randomness is a function of
(seed, step, sample), never a history, so that a run can be cut anywhere and resumed to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.training.export import export_modules
from patchloom.training.processes import Processes
from patchloom.training.run import Run


@dataclass(frozen=True)
class Metric:
    """A value of `Task.evaluate` that says how good the modules are."""

    name: str
    higher_is_better: bool = True
    percent: bool = False  # how to print it: a fraction as a percentage

    def improves(self, value: float, best: float | None) -> bool:
        """Whether `value` is better than `best`; the first value always is, an equal one is not."""
        return best is None or (value > best if self.higher_is_better else value < best)

    def text(self, value: float) -> str:
        """The value as it is printed."""
        return f"{value:.2%}" if self.percent else f"{value:.4f}"


@dataclass(frozen=True)
class Result:
    """What the loop hands over at the end of a run."""

    modules: nn.ModuleDict  # the result: averaged where the task averages and the recipe asks for it
    averaged: bool
    step: int
    best: Mapping[str, Any]  # {"value", "step"} of the best evaluation


class Task:
    """What is learned. A subclass sets `modules` and `steps_per_epoch` and defines `batches`, `losses` and `evaluate`.

    Between steps a task keeps nothing but its modules and the tensors of `state`: both are in every checkpoint.
    """

    processes: Processes = Processes()  # set before training
    config: Any  # what recipe.yaml holds of it, with what the data decided (a TaskConfig)
    modules: nn.ModuleDict  # everything with parameters; the loop moves, shards and saves it
    steps_per_epoch: int
    metric: Metric | None = None  # of `evaluate`: decides which checkpoint is the best; None: the newest
    unit = "images"  # what `weight` counts
    evaluates_start = False  # whether the log begins with an evaluation before the first step

    @property
    def trained(self) -> Collection[str]:
        """The modules that get gradients; the others (target networks, teachers) are saved with them."""
        return tuple(self.modules)

    @property
    def averaged(self) -> Collection[str]:
        """The modules that the recipe's EMA covers."""
        return self.trained

    def to(self, device: torch.device) -> None:
        """Move to the device that computes. Override it to move tensors of the task's own, such as a memory."""
        self.modules.to(device)

    def state(self) -> dict[str, Tensor]:
        """Tensors beside the modules' that a checkpoint needs: memories, centres, queues. Every process calls it, and
        all must give the same: what differs between processes is gathered here, and shared out in `load_state`."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave, in place."""
        own = self.state()
        # The symmetric difference: names that only one side has, whichever side it is.
        if missing := own.keys() ^ state.keys():
            raise KeyError(f"state {sorted(missing)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def batches(self, start: int, end: int) -> Generator[Any, None, None]:
        """This process's share of the batches of steps `start` to `end`: tensors in any nesting of tuples, lists and
        dictionaries. The loop moves them to the device, and splits them along the first dimension to accumulate.

        Batches depend on the step only, never on those before: a resumed run asks for them from its own step on, and
        must get what an undisturbed run would have got.
        """
        raise NotImplementedError

    def split_batch(self, batch: Any, parts: int) -> list[Any]:
        """A batch in `parts` for accumulation: tensors along their first dimension, lists by their entries."""
        return split(batch, parts)

    def weight(self, batch: Any) -> float:
        """What the batch counts: images, tokens, instances. Losses are divided by its sum over all processes."""
        return float(len(first_tensor(batch)))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        """Named losses, weighted: their sum is minimised. Each is a sum over the batch, or one value per sample (B,),
        which the loop adds up. `part` counts the parts of an accumulated step.

        It must not change the task: a step may be given up after it (a loss that is not finite, a signal). Targets and
        memories change in `after_step`."""
        raise NotImplementedError

    def after_backward(self, step: int) -> None:
        """Before update `step` (from 0 on), with its gradients complete, before they are clipped: a parameter whose
        gradient is taken away (None) is left out of the update."""

    def after_step(self, step: int) -> None:
        """After update `step` (from 1 on): target networks, memories."""

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """Metrics over all processes, as Python numbers, with the trained modules in evaluation mode. Every process
        calls `after_batch` equally often; what it raises goes through."""
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """What describes the modules in a checkpoint, as JSON: config, class names, preprocessing."""
        return {}

    def environment(self) -> dict[str, Any]:
        """What environment.json remembers of data and teachers, as JSON; `data` is among it."""
        return {"data": {}}

    def finish(self, run: Run, result: Result) -> None:
        """Write the report, then the export; with the export a run is finished. Every process calls it. By default the
        trained modules are exported with their own tensor names."""
        export_modules(run, result, self.trained, self.processes.is_main_process)


def first_tensor(batch: Any) -> Tensor:
    """The first tensor in a nesting of tuples, lists and dictionaries; its first dimension counts the samples.

    Raises:
        PatchloomError: There is not one, or it is a single number.
    """
    found = next(_tensors(batch), None)
    if found is None or not found.ndim:
        raise PatchloomError(
            "The samples of a batch cannot be counted: its first tensor needs a first dimension with one entry per "
            "sample. A task of your own can define weight(batch)."
        )
    return found


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def split(batch: Any, parts: int) -> list[Any]:
    """A batch in equal parts: tensors along their first dimension, lists by their entries, one per sample. Tuples and
    dictionaries are structure, and anything else goes to every part."""
    if parts == 1:
        return [batch]

    def part(value: Any, i: int) -> Any:
        if isinstance(value, Tensor):
            # Views, not copies.
            return value.tensor_split(parts)[i]
        size, more = divmod(len(value), parts)  # as tensor_split divides: the first parts have one more
        start = i * size + min(i, more)
        return value[start : start + size + (i < more)]

    return [_each(batch, lambda value, i=i: part(value, i)) for i in range(parts)]  # type: ignore[misc]


def head(batch: Any, count: int) -> Any:
    """The first `count` samples of a batch, in the same structure."""
    return _each(batch, lambda values: values[:count])


def _each(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` of every tensor and list in it."""
    if isinstance(batch, Tensor | list):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _each(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple):
        values = [_each(value, function) for value in batch]
        # A namedtuple takes its values as arguments, a plain tuple as one sequence.
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
