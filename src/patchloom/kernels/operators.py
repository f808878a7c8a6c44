"""Registration of the kernels as torch operators, torch.ops.patchloom.NAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# kept for the life of the process: operators vanish with their library
_operators = torch.library.Library("patchloom", "DEF")


def operator(schema: str, meta: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as torch.ops.patchloom.NAME, with `meta` for shapes alone.

    A name that ends in `_` is for an operator that adds to its first argument, which its schema marks by (a!).

    Args:
        schema: in torch's language; "(a!)" marks what is written to.
        meta: the same arguments -> empty tensors of the output's shapes.
    """
    name = schema.split("(")[0]
    _operators.define(schema)
    # For torch's meta device and for compilers, which need shapes without values.
    _operators.impl(name, meta, "Meta")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operators.impl(name, function, "CPU")
        return function

    return register


def returns_nothing(*_: Any) -> None:
    """The shapes that an operator in place returns."""
    return None
