"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.errors import PatchloomError


def collate(samples: Sequence[Any]) -> Any:
    """Samples of one structure, stacked: each leaf of the batch has the samples along a new first dimension.

    Tuples, lists and dicts keep their form, at any depth. Arrays and tensors of one shape become a tensor (B, ...),
    numbers a tensor (B,), None stays None, and texts and other values become a list of B. Arrays of different shapes
    are a `PatchloomError`: such a task gives a `collate` of its own.
    """
    first = samples[0]
    if isinstance(first, (np.ndarray, Tensor)):
        return _stack(samples)
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(sample) != len(first) for sample in samples):
            raise PatchloomError(
                f"Samples with {sorted({len(sample) for sample in samples})} parts cannot be stacked to one batch: "
                "return the same number for every image, or give a `collate` function."
            )
        return tuple(collate(part) for part in zip(*samples, strict=True))
    # A tensor cannot hold None: if some samples lack the number, the batch is a list.
    if isinstance(first, (int, float, np.number)) and not any(sample is None for sample in samples):
        return torch.tensor(samples)
    return None if all(sample is None for sample in samples) else list(samples)


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
    return torch.stack([torch.as_tensor(sample) for sample in samples])
