"""Compile the C++ kernels when the package is built; without a compiler the package is pure Python and still whole."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/patchloom/kernels")


class Kernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        folder = Path(self.root) / KERNELS
        build = runpy.run_path(str(folder / "build.py"))
        self.app.display_info(build["build"](folder))
        libraries = sorted(folder.glob("*.so"))
        if libraries:
            build_data["pure_python"], build_data["infer_tag"] = False, False
            build_data["tag"] = f"py3-none-{_platform()}"
            build_data["artifacts"] += [str(KERNELS / library.name) for library in libraries]


def _platform() -> str:
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
