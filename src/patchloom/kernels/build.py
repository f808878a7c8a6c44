"""Compile native.cpp, once for each instruction set that it is written for; needs nothing but a C++ compiler.

python build.py [FOLDER]
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
INSTRUCTION_SETS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


def library(instruction_set: str, folder: Path = SOURCE.parent) -> Path:
    return folder / f"native-{instruction_set}.so"


def build(folder: Path = SOURCE.parent) -> str:
    """Put the libraries into `folder`; a sentence that says what came of it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"The C++ kernels are for Linux on x86-64, not {sys.platform} on {platform.machine()}: torch's are used."
    if compiler is None:
        return "There is no C++ compiler (g++ or clang++): torch's operators are used instead of the C++ kernels."
    for name, flags in INSTRUCTION_SETS.items():
        fresh = library(name, folder).with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"The C++ kernels could not be compiled ({why}): torch's operators are used."
        fresh.replace(library(name, folder))
    return f"The C++ kernels are compiled for {' and '.join(INSTRUCTION_SETS)}."


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parent))
