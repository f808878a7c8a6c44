"""Install hints work for a checkout and for a wheel, and never name a package that is not on the index."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchloom import install

ROOT = Path(__file__).parents[1]
HINT = "import sys; sys.path.insert(0, sys.argv[1]); import patchloom.install as i; print(i.install_hint(sys.argv[2]))"


def hint(place: Path, extra: str, cwd: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", HINT, str(place), extra], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index("install") + 1 :]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The package beside metadata as hatchling writes it, as an installed wheel has it."""
    shutil.copytree(ROOT / "src/patchloom", tmp_path / "site/patchloom", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "site/patchloom-9.dist-info").mkdir()
    (tmp_path / "site/patchloom-9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.4\nName: patchloom\nVersion: 9\nRequires-Dist: torch>=2.6\n"
        "Requires-Dist: onnx>=1.17; extra == 'onnx'\nRequires-Dist: onnxruntime>=1.20; extra == 'onnx'\n"
        "Requires-Dist: patchloom[onnx]; extra == 'export'\nRequires-Dist: openvino>=2025.0; extra == 'export'\n"
        "Requires-Dist: huggingface-hub>=1.0; (python_version >= '3.10') and extra == 'hub'\n"
    )
    return tmp_path / "site"


def test_a_checkout_is_installed_again_with_the_extra(tmp_path: Path) -> None:
    assert hint(ROOT / "src", "onnx", ROOT) == ["-e", ".[onnx]"]
    assert hint(ROOT / "src", "onnx", tmp_path) == ["-e", f"{ROOT}[onnx]"]


def test_a_wheel_names_the_packages_themselves(wheel: Path, tmp_path: Path) -> None:
    assert hint(wheel, "onnx", tmp_path) == ["onnx>=1.17", "onnxruntime>=1.20"]
    assert hint(wheel, "export", tmp_path) == ["onnx>=1.17", "onnxruntime>=1.20", "openvino>=2025.0"]
    assert hint(wheel, "hub", tmp_path) == ["huggingface-hub>=1.0"]


def test_the_pip_is_that_of_the_python_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.pip_install("timm>=1") == f"{sys.executable} -m pip install 'timm>=1'"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install.pip_install("timm") == "pip install timm"


def test_no_text_installs_patchloom_from_the_index() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "examples/Containerfile",
        *(ROOT / "docs").rglob("*.md"),
    ]
    wrong = re.compile(r"pip install (?:[^\n`]* )?['\"]?patchloom(?=[\['\"\s`.]|$)", re.M)
    texts = {path: path.read_text(encoding="utf-8") for path in (*pages, *(ROOT / "src").rglob("*.py"))}
    found = {str(path): wrong.search(text)[0] for path, text in texts.items() if wrong.search(text)}
    assert set(found) <= {str(ROOT / "src/patchloom/install.py")}, found  # which explains why not


def test_every_extra_that_a_message_names_exists() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^(\w+) = \[", settings.split("[project.optional-dependencies]")[1], re.M))
    used = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"""(?:install_hint\(|needed\("[^"]+", )['"](\w+)""", path.read_text(encoding="utf-8"))
    }
    assert {"onnx", "export", "serve", "hub", "timm", "figures", "slurm"} <= used <= extras
