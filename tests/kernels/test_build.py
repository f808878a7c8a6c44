"""The kernels are compiled where they can be, and missed by nobody where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchloom.kernels import build, libraries


@pytest.mark.parametrize(("variable", "value", "words"), [
    (libraries.SWITCH, "0", "switches the C++ kernels off"), ("ATEN_CPU_CAPABILITY", "default", "need AVX2 or AVX-512"),
])  # fmt: skip
def test_without_them_the_pure_form_answers_and_one_sentence_says_why(variable: str, value: str, words: str) -> None:
    code = (
        "import torch, patchloom; from patchloom.kernels import native; print(native.why_not());"
        "m = patchloom.create_model('cait_nano', img_size=16).eval(); x = torch.randn(2, 3, 16, 16);"
        "assert torch.allclose(patchloom.fuse(m)(x), m(x), atol=1e-5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, variable: value}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_a_build_without_a_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in build.build(tmp_path)
    monkeypatch.setenv("CXX", 'g++ "')
    assert "is not a command" in build.build(tmp_path)
    for compiler in ("/bin/false", "/bin/true", "/nowhere/g++", "/usr/bin/env false"):
        monkeypatch.setenv("CXX", compiler)
        (tmp_path / "networks-avx2-old.so").touch()
        (tmp_path / "another.so").touch()
        assert "could not be compiled" in build.build(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["another.so"]


def test_a_compiler_that_knows_some_instructions_leaves_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says that torch does the work, so no processor may find a library."""
    folder, compiler = tmp_path / "kernels", tmp_path / "compiler"
    folder.mkdir()
    compiler.write_text('case "$*" in *vnni*) exit 1;; esac; for out; do :; done; echo library > "$out"')
    monkeypatch.setenv("CXX", f"sh {compiler}")
    assert "could not be compiled" in build.build(folder)
    assert not list(folder.iterdir())


def test_a_build_takes_no_library_away_before_its_successor_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compiler = tmp_path / "kernels", tmp_path / "compiler"
    folder.mkdir()
    files = {build.library_file(name, folder) for name in build.LIBRARIES}
    for file in (*files, folder / "networks-avx2-old.so"):
        file.write_text("before")
    # the first argument is where to note what is there while it compiles, the last one the file to write
    compiler.write_text('ls "$1" >> "$1.seen"; for out; do :; done; echo after > "$out"')
    monkeypatch.setenv("CXX", f"sh {compiler} {folder}")
    assert "are compiled" in build.build(folder)
    assert all((tmp_path / "kernels.seen").read_text().count(file.name) == len(files) for file in files)
    assert set(folder.iterdir()) == files
    assert {file.read_text() for file in files} == {"after\n"}
