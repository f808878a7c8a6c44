"""The package as it is built for others: with the kernels where there is a compiler, and whole without one."""

from __future__ import annotations

import os
import re
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


def build_wheel(tree: Path, out: Path, environment: dict[str, str]) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), "."]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    return wheel


def test_what_the_container_copies_is_enough_for_a_wheel(tmp_path: Path) -> None:
    """Exactly the files of the COPY lines, in an empty folder; without a compiler, as in a slim image."""
    tree = tmp_path / "tree"
    tree.mkdir()
    copies = re.findall(r"^COPY (.+) (\S+)$", (ROOT / "examples" / "Containerfile").read_text(), re.M)
    assert copies
    for names, target in copies:
        for name in names.split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy(ROOT / name, tree / target)
    wheel = build_wheel(tree, tmp_path / "out", {**os.environ, "CXX": "/bin/false"})
    with zipfile.ZipFile(wheel) as archive:
        assert {"patchloom/report.js", "patchloom/report.css"} <= set(archive.namelist())


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
    wheel = build_wheel(tree, out, environment)
    with zipfile.ZipFile(wheel) as archive:
        libraries = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
        archive.extractall(installed)
    assert libraries == (set() if compiler else {build.library_file(name).name for name in build.LIBRARIES})
    assert wheel.name.endswith("-py3-none-any.whl" if compiler else "-py3-none-linux_x86_64.whl")
    done = subprocess.run([sys.executable, "-c", RUN, str(installed)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("not compiled" in done.stdout) == bool(compiler)
