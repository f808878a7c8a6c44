"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.errors import PatchloomError

_NUMBERS = (int, float, np.number, np.bool_)


def collate(samples: Sequence[Any]) -> Any:
    """Samples of one structure, stacked: each leaf of the batch has the samples along a new first dimension.

    Tuples, lists and dicts keep their form, at any depth. Arrays and tensors of one shape become a tensor (B, ...),
    numbers a tensor (B,), None stays None, and texts and other values become a list of B. Arrays of different shapes,
    and samples of different structures, are a `PatchloomError`: such a task gives a `collate` of its own.
    """
    first = samples[0]
    if isinstance(first, Tensor) or (isinstance(first, np.ndarray) and first.dtype.kind in "biufc"):
        return _stack(_alike(samples, (np.ndarray, Tensor)))
    if isinstance(first, Mapping):
        if any(sample.keys() != first.keys() for sample in _alike(samples, Mapping)):
            raise PatchloomError(
                f"Samples with the keys {', '.join(sorted({str(list(sample)) for sample in samples}))} cannot be "
                "stacked to one batch: give every sample the same keys."
            )
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        _alike(samples, (tuple, list))
        if any(len(sample) != len(first) for sample in samples):
            raise PatchloomError(
                f"Samples with {sorted({len(sample) for sample in samples})} parts cannot be stacked to one batch: "
                "return the same number for every image, or give a `collate` function."
            )
        return tuple(collate(part) for part in zip(*samples, strict=True))
    # A tensor cannot hold None: if some samples lack the number, the batch is a list.
    if isinstance(first, _NUMBERS) and not any(sample is None for sample in samples):
        return _numbers(_alike(samples, (*_NUMBERS, Tensor, np.ndarray)))
    return None if all(sample is None for sample in samples) else list(samples)


def _alike(samples: Sequence[Any], kind: type | tuple[type, ...]) -> Sequence[Any]:
    """The samples, if all are of the kind of the first one."""
    if others := sorted({type(sample).__name__ for sample in samples if not isinstance(sample, kind)}):
        raise PatchloomError(
            f"Samples of the types {type(samples[0]).__name__} and {', '.join(others)} cannot be stacked to one batch: "
            "give every sample the same type."
        )
    return samples


def _numbers(samples: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(samples)
    except (TypeError, ValueError, RuntimeError) as error:  # beyond 64 bits, or an array among numbers
        raise PatchloomError(f"The numbers of a batch cannot be put into a tensor: {error}.") from error


def _stack(samples: Sequence[np.ndarray | Tensor]) -> Tensor:
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) > 1:
        raise PatchloomError(
            f"Samples of the shapes {', '.join(map(str, sorted(shapes)))} cannot be stacked to one batch: give "
            "them one shape in the dataset or the transform; a task of your own can pass a `collate` function."
        )
    if all(isinstance(sample, np.ndarray) for sample in samples):
        # One copy: numpy stacks, torch shares its memory.
        return torch.from_numpy(np.stack(samples))
    # Without gradients: what a batch was computed from is not trained, and a worker could not send it.
    return torch.stack([torch.as_tensor(sample).detach() for sample in samples])
