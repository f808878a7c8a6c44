"""The tensors of a run by name, as checkpoints hold them: modules, averages, optimizer states, the task's own.

MODULE.TENSOR              modules of the task
ema.MODULE.TENSOR          their averages
optimizer.MODULE.TENSOR.KEY
state.NAME                 what `Task.state` gives

Optimizer states are named after their parameters, not numbered as in `Optimizer.state_dict`: a checkpoint then fits an
optimizer whose groups are in another order, and can be read without building one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from patchloom.errors import PatchloomError
from patchloom.text import describe
from patchloom.training.averaging import Average
from patchloom.training.sharding import fill, like
from patchloom.training.task import Task
from patchloom.weights.files import STORED_TYPES

_EMA, _OPTIMIZER, _STATE = "ema", "optimizer", "state"
RESERVED = (_EMA, _OPTIMIZER, _STATE)  # modules cannot be called so


class TrainingState:
    """The tensors of a task in training. Of sharded modules every process has its part, of any other the whole."""

    def __init__(self, task: Task, modules: nn.ModuleDict, average: Average | None, optimizer: Optimizer) -> None:
        self.task, self.modules, self.average, self.optimizer = task, modules, average, optimizer

    def tensors(self) -> dict[str, Tensor]:
        """By name, not copied; every process calls it."""
        tensors = dict(self.modules.state_dict())
        if self.average:
            tensors |= {f"{_EMA}.{name}": tensor for name, tensor in self.average.model.state_dict().items()}
        for name, parameter in self.modules.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}.{name}.{key}"] = value
        state = self.task.state()
        if not isinstance(state, Mapping):
            raise PatchloomError(f"state of the task {type(self.task).__name__} returns {describe(state)}, not a dict.")
        named = {f"{_STATE}.{name}": tensor for name, tensor in state.items()}
        check_storable(named)
        return tensors | named

    def empty(self, name: str, shape: torch.Size) -> Tensor | None:
        """What a tensor of a checkpoint is read into, sharded as it is here; None for what this run does not have."""
        name = self._current_name(name)
        part, _, rest = name.partition(".")
        if part == _OPTIMIZER:
            owner = dict(self.modules.named_parameters())[rest.rpartition(".")[0]]
            # Moments have the shape of their parameter and are sharded with it; step counters are scalars and are not.
            return torch.zeros_like(owner) if owner.shape == shape else torch.zeros(shape)
        if part == _EMA:
            return torch.zeros_like(self.average.model.state_dict()[rest]) if self.average else None
        if part == _STATE:
            return torch.zeros_like(self.task.state()[rest])
        return torch.zeros_like(self.modules.state_dict()[name])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of a checkpoint, whatever the number of processes that wrote it."""
        named = {self._current_name(name): tensor for name, tensor in tensors.items()}
        parts = {part: _under(part, named) for part in RESERVED}
        fill(self.modules, {name: tensor for name, tensor in named.items() if name.partition(".")[0] not in parts})
        if self.average:
            fill(self.average.model, parts[_EMA])
        for name, parameter in self.modules.named_parameters():
            if found := _under(name, parts[_OPTIMIZER]):
                fused = bool(self.optimizer.defaults.get("fused"))  # then its counters are where the parameter is
                self.optimizer.state[parameter] = {key: like(value, parameter, fused) for key, value in found.items()}
        self.task.load_state(parts[_STATE])

    def _current_name(self, name: str) -> str:
        """Version 0.1 knew one module, and left its name out of averages and optimizer states."""
        part, _, rest = name.partition(".")
        if part not in (_EMA, _OPTIMIZER) or rest.partition(".")[0] in self.modules:
            return name
        return f"{part}.{next(iter(self.modules))}.{rest}"


def check_storable(state: Mapping[str, Any]) -> None:
    """Refuse what a checkpoint cannot hold: anything but plain tensors of a type that safetensors knows."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise PatchloomError(f"A checkpoint holds tensors; {name} is {describe(value)}. Make a tensor of it.")
        if value.dtype not in STORED_TYPES or value.layout != torch.strided:
            kind = str(value.layout if value.layout != torch.strided else value.dtype).removeprefix("torch.")
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in STORED_TYPES))
            raise PatchloomError(
                f"A checkpoint cannot hold {name}, a tensor of {kind}. Dense tensors of {known} can be."
            )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}
