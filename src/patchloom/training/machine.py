"""What a result depends on beside its settings: versions, the machine, and the state of the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from typing import Any

import torch

from patchloom.devices import available_devices, device_name

_PACKAGES = ("patchloom", "torch", "torchvision", "timm", "numpy", "pillow", "safetensors", "scikit-learn")


def describe_machine() -> dict[str, Any]:
    """What environment.json holds of them, to explain later why a result differs."""
    return {
        "python": platform.python_version(),
        "packages": packages(),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "accelerators": [device_name(torch.device(name)) for name in available_devices()[1:]],
        },
        "git": _git_state(),
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@cache
def packages() -> dict[str, str | None]:
    """The versions of the libraries that a result depends on."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """The commit of the current folder and the number of changed files; None outside a repository."""
    try:
        commit, changes = (
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": len(changes.splitlines())}
