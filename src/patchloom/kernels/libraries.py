"""The compiled libraries: whether they can be used here, and their functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from patchloom.kernels.build import library_file

SWITCH = "PATCHLOOM_KERNELS"  # 0, no, off or false in the environment: never
_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}


@cache
def instruction_set() -> str:
    """What torch found in this processor: avx2, avx512, avx512-vnni (int8 matmul) or another word."""
    found = torch.backends.cpu.get_cpu_capability().lower()
    more = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "avx512-vnni" if found == "avx512" and more.get("avx512_vnni") else found


def why_not(name: str) -> str | None:
    """Why a library cannot be used here, as a sentence; None when it can."""
    if os.environ.get(SWITCH, "").lower() in ("0", "no", "off", "false"):
        return f"{SWITCH}={os.environ[SWITCH]} switches the C++ kernels off."
    if instruction_set() not in ("avx2", "avx512", "avx512-vnni"):
        return f"The C++ kernels need AVX2 or AVX-512; torch says that this processor has {instruction_set()}."
    if not library_file(name).exists():
        return (
            "The C++ kernels were not compiled when patchloom was installed, or from other sources: install it again "
            "where there is a C++ compiler."
        )
    try:
        # Loading it shows what a check of the file cannot: a missing OpenMP library, for instance.
        ctypes.CDLL(str(library_file(name)))
    except OSError as error:
        return f"The C++ kernels cannot be loaded ({error})."
    return None


def open_library(name: str, signatures: Mapping[str, str]) -> ctypes.CDLL:
    """A library whose functions, patchloom_NAME, take what `signatures` say: p a pointer, n int64, f float, i int."""
    loaded = ctypes.CDLL(str(library_file(name)))
    for function, arguments in signatures.items():
        # Without argtypes ctypes would pass every number as a C int and cut 64-bit sizes and pointers.
        getattr(loaded, f"patchloom_{function}").argtypes = [_KINDS[kind] for kind in arguments]
        getattr(loaded, f"patchloom_{function}").restype = None
    return loaded
