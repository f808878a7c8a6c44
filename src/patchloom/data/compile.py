"""Compile native.cpp; needs nothing but a C++ compiler.

python compile.py
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
LIBRARY = Path(__file__).with_name("native-avx2.so")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-mavx2", "-ffp-contract=off")  # rounded as Pillow's C is


def build(library: Path = LIBRARY) -> str:
    """Compile the library; a sentence that says what came of it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        where = f"{sys.platform} on {platform.machine()}"
        return f"The C++ picture steps are for Linux on x86-64, not {where}: Pillow does them."
    if compiler is None:
        return "There is no C++ compiler (g++ or clang++): Pillow does the picture steps."
    fresh = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(fresh)], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"The C++ picture steps could not be compiled ({why}): Pillow does them."
    fresh.replace(library)
    return "The C++ picture steps are compiled."


if __name__ == "__main__":
    print(build())
