"""Devices: which one computes, what it can do, and how data gets there.

The only module that asks torch about accelerators. It works on `torch.accelerator`, so that CUDA, MPS, XPU and
registered backends are treated alike, and it finds out what a device can do by trying. Everything may import it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError, did_you_mean

Device = str | torch.device | None


def choose_device(name: Device = "auto") -> torch.device:
    """The device with this name, such as `cpu`, `cuda:1` or `mps`.

    `auto` (or None) is the accelerator of this machine, or the CPU if it has none. Without an index, a process that
    torchrun started takes the device of its LOCAL_RANK.

    Raises:
        PatchloomError: There is no such device here; the message lists those that there are.
    """
    wanted = "auto" if name is None else str(name)
    kind, colon, index = wanted.partition(":")
    kinds = {device.partition(":")[0] for device in available_devices()}
    if wanted == "auto":
        kind = _accelerator() or "cpu"
    elif kind not in kinds or (colon and not index.isdecimal()) or (kind == "cpu" and int(index or 0)):
        raise _refused(wanted)
    if kind == "cpu":
        return torch.device("cpu")
    # "cuda" without an index: torchrun's processes must not all take cuda:0.
    place = int(index) if colon else _own_index()
    if place >= torch.accelerator.device_count():
        raise _refused(f"{kind}:{place}")
    return torch.device(kind, place)


def available_devices() -> list[str]:
    """The names of the devices of this machine, the CPU first: ["cpu", "cuda:0", "cuda:1"]."""
    kind = _accelerator()
    return ["cpu", *(f"{kind}:{i}" for i in range(torch.accelerator.device_count() if kind else 0))]


def _accelerator() -> str | None:
    """The type of this machine's accelerator, such as `cuda`; torch works with one type at a time."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _own_index() -> int:
    """The device of a process without a given one: that of its local rank, or the current one."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() else max(0, torch.accelerator.current_device_index())


def _refused(name: str) -> PatchloomError:
    known = ["auto", *available_devices()]
    hint = did_you_mean(name, known)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > len(known) - 2 > 0:
        hint += f" torchrun started {processes} processes on this machine: one for each accelerator is the most."
    return PatchloomError(
        f"The device {name!r} is not available on this machine. Choose from: {', '.join(known)}.{hint}"
    )


def make_current(device: torch.device) -> None:
    """Make a device the one that `auto` and names without an index mean in this process."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its work; a time measured before that is too short."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters and buffers are; the CPU for one without any."""
    # The first tensor decides: a module is on one device as a whole.
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """What a device is called: its product name where torch knows one, else `cpu`, `mps:0`."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"


def process_backend(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on a device: gloo for the CPU, nccl for CUDA.

    Raises:
        PatchloomError: torch cannot join processes on this device.
    """
    try:
        return torch.distributed.get_default_backend_for_device(device)
    except ValueError as error:
        raise PatchloomError(
            f"Several processes cannot train on {device}: use --device cpu, or one process."
        ) from error


@cache
def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device computes with a dtype: MPS has no float64, older ones no bfloat16."""
    try:
        # Tried rather than looked up: backends that register themselves have no table of dtypes.
        return float((torch.ones(2, dtype=dtype, device=device) + 1).sum()) == 4.0
    except (RuntimeError, TypeError, AssertionError):  # the last of a torch that was built without the device
        return False


@cache
def pins_memory(device: torch.device) -> bool:
    """Whether batches for a device should be in pinned memory, from which copies run while the host goes on."""
    if device.type == "cpu":
        return False
    try:
        # Some backends accept the call and give ordinary memory, hence the question after it.
        return torch.zeros(1).pin_memory().is_pinned()
    except (RuntimeError, TypeError):
        return False


def to_device(structure: Any, device: torch.device) -> Any:
    """Tensors, and those in tuples, lists and dicts, on a device; anything else stays as it is.

    From pinned memory the copy does not wait.

    Args:
        structure: a batch, in any nesting; lists, tuples, named tuples and dicts keep their types.
    """
    if isinstance(structure, Tensor):
        moves = structure.device != device and device.type != "cpu"
        return structure.to(device, non_blocking=moves and structure.device.type == "cpu" and structure.is_pinned())
    if isinstance(structure, dict):
        return type(structure)((key, to_device(value, device)) for key, value in structure.items())
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):  # a named tuple
        return type(structure)(*(to_device(value, device) for value in structure))
    if isinstance(structure, tuple | list):
        return type(structure)(to_device(value, device) for value in structure)
    return structure
