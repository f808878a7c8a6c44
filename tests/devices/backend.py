"""The test device `loom`: compiles backend.cpp once per version of torch, and registers it with torch.

A process in which it is registered has an accelerator: `device="auto"` means loom:0. Tests therefore register it in
processes of their own (see the fixture `on_loom` of test_device.py).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch

NAME = "loom"
_SOURCE = Path(__file__).with_name("backend.cpp")


def register() -> None:
    """Make torch know the device `loom`, in this process."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    library = compiled()
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(library))
    torch._register_device_module(NAME, _module())


def compiled() -> Path:
    """The library, built unless it is in the cache."""
    flags = _flags()
    key = hashlib.sha256(f"{_SOURCE.read_text()} {torch.__version__} {flags}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "patchloom" / "tests"
    library = cache / f"loom-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # several test processes may build at once
            built = Path(folder) / "loom.so"
            subprocess.run([os.environ.get("CXX", "g++"), str(_SOURCE), *flags, "-o", str(built)], check=True)
            os.replace(built, library)
    return library


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    return [
        "-std=c++20", "-O1", "-w", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
        f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _module() -> types.ModuleType:
    """`torch.loom`: what torch asks of the Python module of a device."""
    module = types.ModuleType(f"torch.{NAME}")
    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": torch.ops.loom.current_device,
        "set_device": lambda device: torch.ops.loom.set_device(torch.device(device).index or 0),
        "get_device_name": lambda device=None: "test device",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed_all": lambda seed: None,  # operators draw from the generator of the CPU
        "_is_in_bad_fork": lambda: False,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
