"""Registration of the kernels as torch operators, torch.ops.patchloom.NAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_operators = torch.library.Library("patchloom", "DEF")


def operator(schema: str, meta: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as torch.ops.patchloom.NAME, with `meta` for shapes alone."""
    name = schema.split("(")[0]
    _operators.define(schema)
    _operators.impl(name, meta, "Meta")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operators.impl(name, function, "CPU")
        return function

    return register


def returns_nothing(*_: Any) -> None:
    return None
