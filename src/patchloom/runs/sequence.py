"""Launch and resume what a config describes: one run, or two in sequence, where the second needs what the first has
exported (train low, finish high: FixRes, thesis 6.3.1; a tokenizer, then BeiT; a baseline, then ClusterFit+).

Of two, RUN/stages.json holds the configs, RUN/FOLDER is the first run (`RunSequence.folder`), RUN the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

from patchloom.console import Console, choose_console
from patchloom.devices import Device
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.reading import read_json
from patchloom.runs import launch as single
from patchloom.runs.config import config_from_settings, settings_of
from patchloom.tasks.spec import RunConfig, RunSequence
from patchloom.temporary import write_json
from patchloom.training.callbacks import Callback
from patchloom.training.processes import join_processes, restarted
from patchloom.training.run import STAGES, Run


def launch(
    config: RunConfig,
    out: str | PathLike[str],
    *,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
) -> Run:
    """The run of a config, or its two runs, one after the other; the arguments are those of `runs.launch.launch`.

    Of two, stages.json is written first, so that a kill at any moment can be resumed, by either stage. Callbacks see
    the second one.
    """
    common: dict[str, Any] = {"strict": strict, "log": log, "device": device}
    if config.then is None:
        return single.launch(config, out, console=console, callbacks=callbacks, **common)
    folder, sequence = Path(out), config.then
    processes = join_processes(device)
    if restarted(processes) and processes.gather((folder / STAGES).exists())[0]:
        config.opened.clear()
        return resume(folder, console, device=device, callbacks=callbacks)
    single.check_free(out)
    sequence.check(config)
    processes.wait()  # until all have looked: the main process writes to the folder later
    request = {"low": settings_of(config), "finish": sequence.to_json(), "strict": strict, "log": log}

    def begin() -> None:
        with Run(folder, request).locked():
            _begin(folder, request)

    return _continue(folder, config, sequence, console, {**common, "callbacks": callbacks}, begin)


def _begin(folder: Path, request: dict[str, Any]) -> None:
    """Write stages.json, unless another process has begun a run here since."""
    single.check_free(folder)
    with errors_in_writing(folder):
        write_json(folder / STAGES, request)


def resume(
    folder: str | PathLike[str],
    console: Console | None = None,
    more_epochs: int = 0,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue one run, or two in sequence; `more_epochs` are added to the last one.

    Whether the first run is finished is read from its export, which is written last.
    """
    place, console = Path(folder), choose_console(console)
    # recipe.yaml in RUN itself means that the second run has begun.
    if not (place / STAGES).exists() or (place / "recipe.yaml").exists():
        return single.resume(place, console, more_epochs, device, callbacks)
    if more_epochs:
        raise PatchloomError(f"{place} is in its first stage: `patchloom resume {quote(str(place))}` first.")
    first, sequence, options = _read(place / STAGES)
    return _continue(place, first, sequence, console, {**options, "device": device, "callbacks": callbacks})


def _continue(
    place: Path,
    first: RunConfig,
    sequence: RunSequence,
    console: Console | None,
    options: dict[str, Any],
    begin: Callable[[], None] | None = None,
) -> Run:
    """The first run, unless it is finished, and the second; `options` are those of `launch`. `begin` is called before
    the first file is written."""
    console, earlier = choose_console(console), place / sequence.folder
    console.say(f"Stage 1 of 2, in {earlier}.")
    processes = join_processes(options["device"])
    # The main process looks for all of them: it writes these files, and the others may look later.
    found = [(earlier / name).exists() for name in ("recipe.yaml", "export/model.json")]
    begun, finished = processes.gather(found)[0]
    if not begun:
        single.launch(first, earlier, begin=begin, console=console, **{**options, "callbacks": ()})
    elif not finished:  # model.json is written last
        single.resume(earlier, console, device=options["device"])
    processes.wait()  # until the main process has written the export, which all read
    console.say(f"Stage 2 of 2, {sequence.describe()}.")
    second = sequence.second(first, earlier)
    return single.launch(second, place, second_stage=True, console=console, **options)


def _read(path: Path) -> tuple[RunConfig, RunSequence, dict[str, Any]]:
    """The first run, what comes after it, and the options of both."""
    try:
        request = read_json(path)
        options = {key: request[key] for key in ("strict", "log")}
        first = config_from_settings(request["low"])
        if first.spec.sequence_from_json is None:
            raise ValueError(f"a {first.spec.name} run has no second stage")
        return first, first.spec.sequence_from_json(request["finish"]), options
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is damaged: {error!r}.") from error
