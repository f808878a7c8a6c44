"""Reduced precision, and whether this machine survives it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from patchloom.errors import PatchloomError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROBE = (
    "import torch; torch.manual_seed(0); a = torch.nn.Linear(192, 192); x = torch.randn(64, 192, requires_grad=True)\n"
    "with torch.autocast('cpu', dtype=torch.{dtype}): y = a(x).float().square().mean()\n"
    "y.backward(); assert torch.isfinite(x.grad).all()"
)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The context in which a forward pass runs."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that would kill the process: some machines advertise AMX and then fail on it."""
    if precision != "float32" and device.type == "cpu" and not survives(precision):
        raise PatchloomError(
            f"precision={precision} kills the process on this machine (its advertised instructions do not work): use "
            f"precision=float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 and try again."
        )


@lru_cache
def survives(precision: str) -> bool:
    """Whether a child process could multiply and differentiate in this precision on the CPU."""
    code = _PROBE.format(dtype={"bf16": "bfloat16", "fp16": "float16"}[precision])
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
