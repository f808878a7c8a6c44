"""Reduced precision, and a check that this machine supports it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from patchloom.devices import supports
from patchloom.errors import PatchloomError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Forward and backward of a small linear layer; `{dtype}` is filled in.
_PROBE = (
    "import torch; torch.manual_seed(0); a = torch.nn.Linear(192, 192); x = torch.randn(64, 192, requires_grad=True)\n"
    "with torch.autocast('cpu', dtype=torch.{dtype}): y = a(x).float().square().mean()\n"
    "y.backward(); assert torch.isfinite(x.grad).all()"
)
_PATIENCE = 300  # seconds for the child process, of which importing torch takes a few


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The context in which a forward pass runs.

    Weights and the optimizer stay in float32; only the operations inside the context are in the lower precision.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device does not have, or that would kill the process: some processors advertise AMX
    and then fail on it."""
    if precision == "float32":
        return
    if device.type != "cpu":
        if not (torch.amp.is_autocast_available(device.type) and supports(device, _DTYPES[precision])):
            raise PatchloomError(f"precision={precision} is not available on {device}: use precision=float32.")
    elif why := why_not(precision):
        raise PatchloomError(
            f"precision={precision} {why}: use precision=float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 and try "
            f"again."
        )


def survives(precision: str) -> bool:
    """Whether a child process could multiply and differentiate in this precision on the CPU."""
    return why_not(precision) is None


@cache
def why_not(precision: str) -> str | None:
    """Why a precision cannot be used on this CPU, as the end of a sentence that begins with its name; None if it can.
    A child process tries it."""
    code = _PROBE.format(dtype={"bf16": "bfloat16", "fp16": "float16"}[precision])
    try:
        # In a child process: an illegal instruction kills the process that runs it, and no `except` can catch that.
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"gives no result within {_PATIENCE} seconds on this machine"
    # A negative return code is the number of the signal that killed the child.
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"kills the process on this machine ({name}: its advertised instructions do not work)"
    if done.returncode:
        return f"fails on this machine ({(done.stderr.splitlines() or ['no message'])[-1]})"
    return None
