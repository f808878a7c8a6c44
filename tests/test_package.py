"""The package as a whole: light to import, a public surface that changes only on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomllib

import patchloom
from patchloom.tasks.commands import task_commands

PUBLIC = [
    *("PatchloomError", "__version__", "capture_attention", "complexity", "create_model", "fuse", "layerscale_value"),
    *("distill", "evaluate", "explain", "finetune", "list_models", "load", "parameter_roles", "predict", "save"),
    *("train", "translate", "uniform_drop_rate", "fit", "Callback", "Metric", "Recipe", "Task", "Index", "embed"),
    *("grafit", "pretrain"),
]


def test_public_names() -> None:
    assert sorted([*patchloom.__all__, "__version__"]) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(patchloom, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = patchloom.nonsense


def seconds(code: str) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        best = min(best, time.perf_counter() - started)
    return best


def test_import_costs_little_more_than_torch() -> None:
    assert seconds("import patchloom") < 1.5 * seconds("import torch")


def test_import_loads_nothing_heavy() -> None:
    heavy = ("timm", "torchvision", "matplotlib")
    code = f"import patchloom, patchloom.models, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_name_needs_is_loaded_when_it_is_used() -> None:
    for name in ("create_model", "load"):
        code = f"import patchloom; f = patchloom.{name}; print(len(patchloom.list_models()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) > 60


def test_every_task_is_in_the_import_contract() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    hidden = next(contract["forbidden_modules"] for contract in contracts if "registry only" in contract["name"])
    assert sorted(hidden) == sorted(f"patchloom.tasks.{task.task}" for task in task_commands())
