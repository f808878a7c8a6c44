"""How often the path of one image changes the folder: `python benchmarks/switches.py [--show plan]`.

The path is the first call of each function of patchloom, in the order of the calls. Two functions in a row from
different folders of `patchloom/` (its own files are one folder) are a switch. Not counted are calls while a module is
imported, lambdas and comprehensions. Each path is taken in a process of its own.

    plan      plan_training("digits", "deit_nano", "deit@small", ...)
    build     the task of that plan: images, network
    load      patchloom.load of an exported deit_nano
    predict   `patchloom predict RUN IMAGE` with it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

import patchloom
from patchloom.console import Console
from patchloom.devices import choose_device
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.spec import Context
from patchloom.training.processes import Processes

PATHS = ("plan", "build", "load", "predict")
_ROOT = Path(patchloom.__file__).parent
Path_ = list[tuple[str, str]]  # folder and function


@contextlib.contextmanager
def first_calls() -> Iterator[Path_]:
    """The functions of patchloom that are called inside, each once."""
    seen: dict[CodeType, None] = {}  # in the order of the calls
    importing = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "_find_and_load":
            importing += {"call": 1, "return": -1}.get(event, 0)
        ours = code.co_filename.startswith(str(_ROOT)) and not code.co_name.startswith("<")
        if event == "call" and ours and not importing:
            seen.setdefault(code)

    path: Path_ = []
    sys.setprofile(note)
    try:
        yield path
    finally:
        sys.setprofile(None)
    for code in seen:
        inside = Path(code.co_filename).relative_to(_ROOT)
        folder = inside.parts[0] if len(inside.parts) > 1 else "patchloom"
        path.append((folder, f"{inside.stem}.{getattr(code, 'co_qualname', code.co_name)}"))


def groups(path: Path_) -> list[tuple[str, list[str]]]:
    """The functions between two switches, with their folder."""
    return [(folder, [name for _, name in some]) for folder, some in groupby(path, key=lambda call: call[0])]


def export(folder: Path) -> Path:
    """A run folder as far as `predict` needs one."""
    network = patchloom.create_model("deit_nano", num_classes=10)
    patchloom.save(network, folder / "export" / "model.safetensors")
    described = {"task": "classify", "step": 1, "weights": "raw"}
    (folder / "export" / "model.json").write_text(json.dumps(described))
    return folder


def take(name: str, folder: Path) -> Path_:
    """The path of one name in `PATHS`."""
    run, image = export(folder), folder / "image.png"
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(image)
    choose_device("cpu")
    if name == "plan":
        return _recorded(_plan)
    if name == "build":
        config, context = _plan(), Context(Processes(), Console(quiet=True))
        return _recorded(lambda: config.spec.open(config.task, config.recipe, context))
    if name == "load":
        load = patchloom.load
        return _recorded(lambda: load(run))
    return _recorded(lambda: _predict(run, image))


def _plan() -> Any:
    return plan_training("digits", "deit_nano", "deit@small", {"epochs": 1}, {})


def _predict(run: Path, image: Path) -> None:
    from patchloom.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(["predict", str(run), str(image), "--device", "cpu"])


def _recorded(action: Callable[[], Any]) -> Path_:
    with first_calls() as path:
        action()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=PATHS, help="print the functions of one path, one line per folder")
    parser.add_argument("--take", choices=PATHS, help=argparse.SUPPRESS)  # what the processes are started with
    options = parser.parse_args()
    if name := options.take or options.show:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            found = groups(take(name, Path(folder)))
        if options.take:
            print(json.dumps([len(found) - 1, sum(len(names) for _, names in found)]))
        else:
            print("\n".join(f"{folder:10} {', '.join(names)}" for folder, names in found))
        return
    print(f"{'path':8} {'switches':>9} {'functions':>10}")
    for name in PATHS:
        words = [sys.executable, __file__, "--take", name]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        switches, functions = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:8} {switches:9} {functions:10}")


if __name__ == "__main__":
    main()
