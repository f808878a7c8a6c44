"""Networks on the meta device: names and shapes of tensors without their memory, to compare with those of a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from patchloom.errors import PatchloomError
from patchloom.models.registry import build

_SPARE = 1000  # parameters beyond those of the file, for networks that replace some while they are built


def shape_of(config: Any, label: str, most: int | None = None) -> Any:
    """The network of a config, without memory. `label` is the file that has the config, for errors.

    With `most`, the number of tensors in the file, a network of far more is given up: making a million layers would
    take minutes, even without memory.
    """
    try:
        with torch.device("meta"), _at_most(most):
            return build(config)
    except _TooMany as error:
        raise PatchloomError(f"{label} describes a network of many more tensors than there are in it.") from error
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes that overflow torch's integers
        raise PatchloomError(f"{label} describes a network that cannot be built: {error}.") from error


class _TooMany(Exception):
    """Ends the construction of a network."""


@contextmanager
def _at_most(most: int | None) -> Iterator[None]:
    if most is None:
        yield
        return
    left, thread = 2 * most + _SPARE, threading.get_ident()

    def count(_: nn.Module, __: str, parameter: Any) -> None:
        nonlocal left
        left -= parameter is not None and threading.get_ident() == thread
        if left < 0:
            raise _TooMany

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
