"""Compile the C++ kernels, once for each instruction set that they are written for: python build.py [FOLDER]

Needs nothing but a C++ compiler, so that a build of the package can run it without torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# No -march=native: the libraries may be compiled on one machine and used on another. No -ffast-math: NaN must stay NaN.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


class Library(NamedTuple):
    """A source file and the compiler flags of one instruction set."""

    source: str
    flags: tuple[str, ...]


LIBRARIES = {
    "networks-avx2": Library("networks.cpp", ("-fopenmp", *AVX2)),
    "networks-avx512": Library("networks.cpp", ("-fopenmp", *AVX512)),
    "networks-avx512-vnni": Library("networks.cpp", ("-fopenmp", *AVX512, "-mavx512vnni")),
    "pictures-avx2": Library("pictures.cpp", ("-mavx2", "-ffp-contract=off")),  # rounded as Pillow's C is
}


@cache
def _digest() -> str:
    """A digest of the sources, which is a part of the file name: libraries of other sources are not found."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__)))).hexdigest()[:12]


def library_file(name: str, folder: Path = HERE) -> Path:
    """The file of a library, for the sources as they are now; it need not exist."""
    return folder / f"{name}-{_digest()}.so"


def build(folder: Path = HERE) -> str:
    """Put the libraries into `folder`, and leave no older ones there; a sentence that says what came of it.

    Args:
        folder: where the .so files are put; by default beside the sources.
    """
    sentence, built = _build(folder)
    for name in LIBRARIES:
        for old in set(folder.glob(f"{name}-*.so")).difference(built):
            old.unlink()
    return sentence


def _build(folder: Path) -> tuple[str, list[Path]]:
    """Compile all libraries. Returns a sentence about the result, and the files; none if one failed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{sys.platform} on {platform.machine()}"
        return f"The C++ kernels are for Linux on x86-64, not {here}: torch and Pillow do the work.", []
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    except ValueError as error:
        return (
            f"CXX={os.environ['CXX']} is not a command ({error}): torch and Pillow do the work of the C++ kernels.",
            [],
        )
    if compiler == [""]:
        return "There is no C++ compiler (g++ or clang++): torch and Pillow do the work of the C++ kernels.", []
    files = {name: library_file(name, folder) for name in LIBRARIES}
    for name, library in LIBRARIES.items():
        if why := _compile(compiler, library, files[name]):
            return f"The C++ kernels could not be compiled ({why}): torch and Pillow do the work.", []
    return f"The C++ kernels are compiled: {', '.join(LIBRARIES)}.", list(files.values())


def _compile(compiler: list[str], library: Library, out: Path) -> str | None:
    """Compile one library into `out`. Returns the reason if that fails, else None."""
    # Compiled under a name of its own, then renamed: a process that has the old library loaded keeps it.
    fresh = out.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, *library.flags, str(HERE / library.source), "-o", str(fresh)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    if done.returncode or not fresh.exists():
        return next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    fresh.replace(out)
    return None


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE))
