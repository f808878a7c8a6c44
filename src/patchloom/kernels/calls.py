"""Calls of the compiled kernels: whether they can be used here, and how Python hands tensors to them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from patchloom.kernels import libraries

# The functions of networks.cpp, one letter per argument (see libraries.py): p pointer, n size, f float, i int. The last
# argument is the number of threads.
SIGNATURES = {
    "linear": "ppnppnnfiiii",
    "stem": "pppppii",
    "ffn": "ppnnnppppfii",
    "attention": "pppppppppfii",
    "attention_branch": "ppppppppppffii",
    "pack_bytes": "pnnppi",
    "talking_heads_back": "ppppppppppppi",
    "cross_patch": "pppppi",
    "conv_blocks": "ppppfii",
    "attention_blocks": "pppfffii",
    "gated_linear": "pppnnppnnii",
}


@cache
def why_not() -> str | None:
    """Why the C++ kernels cannot be used here, as a sentence; None when they can."""
    return libraries.why_not(f"networks-{libraries.instruction_set()}")


def available() -> bool:
    """Whether the C++ kernels can be used here."""
    return why_not() is None


def takes_kernels(x: Tensor) -> bool:
    """Whether a tensor can go through the C++ kernels: float32 on a CPU, outside of compilers and tracers.

    A graph with these operators would run on this machine alone, and functorch and forward-mode derivatives need rules
    that they do not have.
    """
    watched = (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
    return x.is_cpu and x.dtype == torch.float32 and not watched and available()


@cache
def library() -> ctypes.CDLL:
    """The kernels compiled for the instructions of this processor."""
    return libraries.open_library(f"networks-{libraries.instruction_set()}", SIGNATURES)


def call(name: str, *arguments: Any) -> None:
    """Call a kernel with tensors, sizes (a tuple becomes an array) and numbers, on as many threads as torch has.

    Args:
        name: of SIGNATURES, without the prefix patchloom_.
        arguments: None becomes a null pointer.
    """
    # `kept` holds the arrays while the kernel reads them
    kept = [(ctypes.c_int64 * len(a))(*a) if isinstance(a, tuple) else a for a in arguments]
    raw = [address(a) if isinstance(a, Tensor) else a for a in kept]
    getattr(library(), f"patchloom_{name}")(*raw, torch.get_num_threads())


def address(x: Tensor) -> int:
    """Where the values of a float32 tensor are. Raises ValueError for other types and devices."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise ValueError(f"the C++ kernels take float32 on a CPU, not {x.dtype} on {x.device}")
    return x.data_ptr()
