"""The command that installs an optional package, for the way in which patchloom itself was installed.

patchloom is not on the package index, so `pip install 'patchloom[onnx]'` finds nothing. A checkout is installed again
with the extra; for an installed wheel, the packages of the extra are named.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from patchloom.errors import PatchloomError

_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_OWN_EXTRAS = re.compile(r"patchloom\[(?P<extras>[^\]]+)\]")


def pip_install(*words: str) -> str:
    """`pip install WORDS`, quoted for a shell, with the pip of the Python that runs now."""
    found = shutil.which("pip")
    # The `pip` on the PATH may belong to another Python.
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    pip = ["pip"] if own else [sys.executable, "-m", "pip"]
    return shlex.join([*pip, "install", *words])


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Imports of an optional package, whose absence is a PatchloomError with the command that installs it.

    Args:
        what: the beginning of the message, such as "BLEU needs sacrebleu".
        extra: the extra of pyproject.toml that has the package.
    """
    try:
        yield
    except ImportError as error:
        raise PatchloomError(f"{what}: {install_hint(extra)}") from error


def install_hint(extra: str) -> str:
    """The command that installs one of the extras of pyproject.toml."""
    root = _checkout()
    if root is not None:
        place = "." if os.path.samefile(os.curdir, root) else str(root)
        return pip_install("-e", f"{place}[{extra}]")
    packages = _packages(extra)
    return pip_install(*packages) if packages else f"see the extra {extra!r} in patchloom's pyproject.toml"


def _checkout() -> Path | None:
    """The source tree that this package is imported from, or None for an installed copy."""
    folder = Path(__file__).resolve().parent
    settings = folder.parents[1] / "pyproject.toml"
    # A folder src/patchloom somewhere in site-packages is not a checkout of ours: its pyproject.toml must name us.
    own = settings.is_file() and 'name = "patchloom"' in settings.read_text(encoding="utf-8")
    return settings.parent if own and folder.parent.name == "src" else None


def _packages(extra: str) -> list[str]:
    """The requirements of an extra as the installed metadata lists them; extras may name other extras of ours."""
    try:
        listed = requires("patchloom") or []
    except PackageNotFoundError:  # a bare copy of the folder: nothing tells what the extra stands for
        return []
    found = [match["package"] for match in map(_REQUIREMENT.match, listed) if match and match["extra"] == extra]
    packages: list[str] = []
    for package in found:
        own = _OWN_EXTRAS.match(package)
        packages += [one for name in own["extras"].split(",") for one in _packages(name)] if own else [package]
    return packages
