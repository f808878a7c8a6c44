"""The package as it is built for others: with the kernels where there is a compiler, and whole without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patchloom.kernels import build

ROOT = Path(__file__).parents[2]
PARTS = ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
RUN = "import sys; sys.path.insert(0, sys.argv[1]); from patchloom.kernels import native; print(native.why_not())"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_a_wheel(compiler: str | None, tmp_path: Path) -> None:
    if compiler is None and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("There is no C++ compiler: no wheel with kernels can be built.")
    tree, out, installed = (tmp_path / name for name in ("tree", "out", "installed"))
    tree.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tree / part)
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment |= {"CXX": compiler} if compiler else {}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), "."]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        libraries = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
        archive.extractall(installed)
    assert libraries == (set() if compiler else {build.library_file(name).name for name in build.LIBRARIES})
    assert wheel.name.endswith("-py3-none-any.whl" if compiler else "-py3-none-linux_x86_64.whl")
    done = subprocess.run([sys.executable, "-c", RUN, str(installed)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("not compiled" in done.stdout) == bool(compiler)
