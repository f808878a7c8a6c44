"""Compile the C++ kernels, once for each instruction set that they are written for: python build.py [FOLDER]

Needs nothing but a C++ compiler, so that a build of the package can run it without torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


class Library(NamedTuple):
    source: str
    flags: tuple[str, ...]


LIBRARIES = {
    "networks-avx2": Library("networks.cpp", ("-fopenmp", *AVX2)),
    "networks-avx512": Library("networks.cpp", ("-fopenmp", *AVX512)),
    "pictures-avx2": Library("pictures.cpp", ("-mavx2", "-ffp-contract=off")),  # rounded as Pillow's C is
}


def library_file(name: str, folder: Path = HERE) -> Path:
    return folder / f"{name}.so"


def build(folder: Path = HERE) -> str:
    """Put the libraries into `folder`; a sentence that says what came of it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{sys.platform} on {platform.machine()}"
        return f"The C++ kernels are for Linux on x86-64, not {here}: torch and Pillow do the work."
    if compiler is None:
        return "There is no C++ compiler (g++ or clang++): torch and Pillow do the work of the C++ kernels."
    for name, library in LIBRARIES.items():
        fresh = library_file(name, folder).with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, *library.flags, str(HERE / library.source), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            return f"The C++ kernels could not be compiled ({why}): torch and Pillow do the work."
        fresh.replace(library_file(name, folder))
    return f"The C++ kernels are compiled: {', '.join(LIBRARIES)}."


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE))
