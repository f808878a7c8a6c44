"""Two runs in sequence: the second needs the weights of the first (train low, finish high: FixRes, thesis 6.3.1).

RUN/stages.json says what was asked for, a folder in RUN is the first run, RUN itself the second.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

from patchloom.console import Console
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.reading import read_json
from patchloom.runs import launch as single
from patchloom.runs.config import config_from_settings, settings_of
from patchloom.tasks.spec import RunConfig, RunSequence
from patchloom.temporary import write_text
from patchloom.training.processes import join_processes, restarted
from patchloom.training.run import Run


def launch(
    first: RunConfig,
    sequence: RunSequence,
    out: str | PathLike[str],
    *,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
) -> Run:
    """Both runs, one after the other.

    stages.json is written first, so that a kill at any moment can be resumed, by either stage.
    """
    folder = Path(out)
    processes = join_processes(device)
    if restarted(processes) and processes.gather((folder / single.STAGES).exists())[0]:
        first.opened.clear()
        return resume(folder, console, device=device)
    single.check_free(out)
    sequence.check(first)
    processes.wait()  # until all have looked: the main process writes to the folder now
    if processes.is_main_process:
        asked = {"low": settings_of(first), "finish": sequence.to_json(), "strict": strict, "log": log}
        with Run(folder, asked).locked():
            _begin(folder, asked)
    processes.wait()
    try:
        return _continue(folder, first, sequence, console, {"strict": strict, "log": log, "device": device})
    except PatchloomError:
        if not (folder / sequence.folder / "recipe.yaml").exists():  # refused before it began: the folder stays free
            (folder / single.STAGES).unlink(missing_ok=True)
        raise


def _begin(folder: Path, asked: dict[str, Any]) -> None:
    """Write what was asked for, where no other process has begun meanwhile."""
    single.check_free(folder)
    try:
        write_text(folder / single.STAGES, json.dumps(asked, indent=1) + "\n")
    except OSError as error:
        raise PatchloomError(f"{folder} cannot be written: {error}.") from error


def resume(
    folder: str | PathLike[str], console: Console | None = None, more_epochs: int = 0, device: Device = "auto"
) -> Run:
    """Continue one run, or two in sequence; `more_epochs` are added to the last one.

    Whether the first run is finished is read from its export, which is written last.
    """
    place, console = Path(folder), console or Console()
    # recipe.yaml in RUN itself means that the second run has begun.
    if not (place / single.STAGES).exists() or (place / "recipe.yaml").exists():
        return single.resume(place, console, more_epochs, device)
    if more_epochs:
        raise PatchloomError(f"{place} is in its first stage: `patchloom resume {quote(str(place))}` first.")
    first, sequence, options = _read(place / single.STAGES)
    return _continue(place, first, sequence, console, {**options, "device": device})


def _continue(
    place: Path, first: RunConfig, sequence: RunSequence, console: Console | None, options: dict[str, Any]
) -> Run:
    """The first run, unless it is finished, and the second; `options` are those of `launch`."""
    console = console or Console()
    options |= {"console": console}
    low = place / sequence.folder
    console.say(f"Stage 1 of 2, in {low}.")
    if not (low / "recipe.yaml").exists():
        single.launch(first, low, **options)
    elif not (low / "export" / "model.json").exists():  # written last
        single.resume(low, console, device=options["device"])
    console.say(f"Stage 2 of 2, {sequence.describe()}.")
    return single.launch(sequence.second(first, low), place, second_stage=True, **options)


def _read(path: Path) -> tuple[RunConfig, RunSequence, dict[str, Any]]:
    """The first run, what comes after it, and the options of both."""
    try:
        asked = read_json(path)
        options = {key: asked[key] for key in ("strict", "log")}
        first = config_from_settings(asked["low"])
        if first.spec.sequence_from_json is None:
            raise ValueError(f"a {first.spec.name} run has no second stage")
        return first, first.spec.sequence_from_json(asked["finish"]), options
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is damaged: {error!r}.") from error
