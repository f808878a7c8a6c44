"""Launch a run: from an empty folder, or from its last checkpoint, to the export and the report. Any task."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

from patchloom.console import Console, choose_console
from patchloom.devices import Device, device_name
from patchloom.errors import PatchloomError, StoppedError
from patchloom.runs.config import config_from_settings, settings_of, with_epochs
from patchloom.tasks.registry import find_task
from patchloom.tasks.spec import Context, RunConfig
from patchloom.training.callbacks import Callback
from patchloom.training.checkpoints import State, read_checkpoint
from patchloom.training.failures import noted_failure
from patchloom.training.loggers import check_log, open_loggers
from patchloom.training.loop import Loop
from patchloom.training.machine import packages
from patchloom.training.processes import Processes, join_processes, restarted
from patchloom.training.run import STAGES, Run
from patchloom.weights.files import exported_step, kept_checkpoints


def launch(
    config: RunConfig,
    out: str | PathLike[str],
    *,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    second_stage: bool = False,
    begin: Callable[[], None] | None = None,
) -> Run:
    """Begin a run in the folder `out`, and train to its end.

    Args:
        config: of a plan function, such as `plan_training`.
        strict: unreadable files are an error instead of being left out.
        log: "wandb" for a copy of the log there.
        callbacks: called after steps and evaluations, in the main process.
        second_stage: the folder holds the first run of a sequence, whose second one this is.
        begin: called in the main process when nothing can be refused any more, before anything is written.

    Raises:
        PatchloomError: the folder is taken, or the task refuses its data or settings.
        InterruptedWork: a signal ended the run; it can be resumed.
    """
    processes, console = join_processes(device), choose_console(console)
    # torchrun repeats the whole command after a failure: what was begun is then resumed. The main process looks, since
    # a shared folder may show files late to others.
    if restarted(processes) and processes.gather((Path(out) / "recipe.yaml").exists())[0]:
        config.opened.clear()
        return resume(out, console, device=device, callbacks=callbacks)
    console.quiet = console.quiet or not processes.is_main_process
    console.say(*config.notes)
    check_free(out, second_stage)
    check_log(log)
    context = Context(processes, console, strict=strict, opened=config.opened)
    task = config.spec.open(config.task, config.recipe, context)
    config.opened.clear()
    settings = settings_of(RunConfig(config.spec, task.config, config.recipe))  # with what the data decided
    run = Run(Path(out), {**settings, "log": log})
    return start_task(run, Loop(task, config.recipe, run, processes, console, callbacks), second_stage, begin)


def start_task(run: Run, loop: Loop, second_stage: bool = False, begin: Callable[[], None] | None = None) -> Run:
    """Begin the folder of a run and train. The loop exists before anything is written: it refuses what cannot be."""
    processes = loop.processes
    with processes.notice_loss(run.continuation), _held(run, processes, begin):
        if processes.is_main_process:
            check_free(run.folder, second_stage)  # again: another process may have begun a run here since
            metric = loop.task.metric and dataclasses.asdict(loop.task.metric)
            run.create({**loop.task.environment(), "device": device_name(processes.device), "metric": metric})
        return _train(run, loop)


def resume(
    folder: str | PathLike[str],
    console: Console | None = None,
    more_epochs: int = 0,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue a run from its last checkpoint, exactly; with `more_epochs`, beyond its end.

    Raises:
        PatchloomError: recipe.yaml was edited, data or teachers have changed, or every checkpoint is damaged.
        InterruptedWork: a signal ended the run again.
    """
    run = Run.open(Path(folder))
    processes, console = join_processes(device), choose_console(console)
    console.quiet = console.quiet or not processes.is_main_process
    config = read_config(run)
    environment = run.environment()
    run.records()  # a damaged log is reported before hours of training
    if more_epochs:
        config = _extended(config, more_epochs, console)
    has_checkpoint = bool(kept_checkpoints(run.checkpoints.folder))
    context = Context(processes, console, environment=environment, from_checkpoint=has_checkpoint)
    task = config.spec.open(config.task, config.recipe, context)
    loop = Loop(task, config.recipe, run, processes, console, callbacks)
    return continue_task(run, loop, settings_of(config), bool(more_epochs))


def continue_task(run: Run, loop: Loop, settings: Mapping[str, Any], extended: bool = False) -> Run:
    """Restore the last checkpoint and train on; `settings` replace those of recipe.yaml once it is known to fit."""
    processes, console = loop.processes, loop.console
    with processes.notice_loss(run.continuation), _held(run, processes):
        # The checkpoint's own versions win; environment.json stands in before the first checkpoint.
        identity = {"packages": run.environment().get("packages")} | _restore(run, loop)
        _report_versions(identity["packages"] or {}, console)
        run.settings |= settings
        if processes.gather(_is_finished(run, loop))[0]:  # files may reach the others late
            can_extend = loop.recipe.steps is None and not find_task(run.settings["task"]).from_python
            more = f" `patchloom extend {quote(str(run.folder))} --epochs N` adds more epochs." if can_extend else ""
            console.say(f"{run.folder} is already finished ({loop.recipe.duration}). Nothing was changed.{more}")
            run.checkpoints.release()
            return run
        # Only now, after the checkpoint has been found to fit: a refused extension must leave no trace.
        if extended and processes.is_main_process:
            run.extend(loop.recipe.epochs)
        return _train(run, loop)


@contextmanager
def _held(run: Run, processes: Processes, begin: Callable[[], None] | None = None) -> Iterator[None]:
    """The lock of the run folder, which the main process takes after `begin`; if it cannot, all raise its error."""
    with ExitStack() as stack:
        problem = None
        if processes.is_main_process:
            try:
                if begin is not None:
                    begin()
                stack.enter_context(run.locked())
            except PatchloomError as error:
                problem = error
        text = processes.gather(problem and str(problem))[0]
        if text is not None:
            raise problem or PatchloomError(text)
        yield


def read_config(run: Run) -> RunConfig:
    """The config of a run folder."""
    try:
        return config_from_settings(run.settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{run.folder / 'recipe.yaml'} is damaged: {error!r}.") from error


def _extended(config: RunConfig, more: int, console: Console) -> RunConfig:
    recipe = config.recipe
    if recipe.steps is not None:
        raise PatchloomError(
            f"The length of the run is given in steps (steps={recipe.steps}), so no epochs can be added."
        )
    epochs = recipe.epochs + more
    consequence = {
        "constant": "the learning rate stays as it is",
        "step": f"the drops of the learning rate stay at epochs {', '.join(map(str, recipe.decay_epochs))}",
    }.get(
        recipe.schedule,
        f"its {recipe.schedule} curve spans all of them, and the learning rate continues from where that curve is at "
        "the last checkpoint",
    )
    console.say(f"The schedule changes to {epochs} epochs instead of {recipe.epochs}: {consequence}.")
    return with_epochs(config, epochs)


def check_out(out: object) -> None:
    """Refuse anything but a path."""
    if not isinstance(out, str | PathLike):
        raise PatchloomError(f"out is the path of a folder for the run, not {type(out).__name__}.")


def check_free(place: str | PathLike[str], second_stage: bool = False) -> None:
    """Refuse a folder that holds a run or cannot be written to; called before any long work.

    The first run of a sequence holds the folder for the second one, which alone may begin there (`second_stage`)."""
    check_out(place)
    if not os.fspath(place) or "\0" in str(place):
        raise PatchloomError("--out is empty or holds a NUL byte. Give the name of a folder for the run.")
    out = Path(place)
    taken = ("recipe.yaml", "checkpoints") if second_stage else ("recipe.yaml", "checkpoints", STAGES)
    if any((out / name).exists() for name in taken):
        raise PatchloomError(
            f"{out} holds a run already: `patchloom resume {quote(str(out))}` continues it, or give another "
            "folder for this run."
        )
    # The nearest parent that exists decides whether the folder can be made.
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PatchloomError(f"{out} cannot be written: {existing} is not a folder that this user may write to.")


def _train(run: Run, loop: Loop) -> Run:
    """From where the loop is to the report; this process has the lock of the folder."""
    processes = loop.processes
    if processes.is_main_process:
        run.renew()
        run.loggers = open_loggers(run.folder, run.settings, loop.counters.step)
    processes.wait()
    try:
        with noted_failure(run.folder, processes.is_main_process), processes.notice_loss(run.continuation):
            _fit_and_finish(run, loop)
    finally:
        run.checkpoints.release()
    return run


def _fit_and_finish(run: Run, loop: Loop) -> None:
    try:
        loop.fit()
    finally:
        for logger in run.loggers:
            logger.close()
    try:
        loop.task.finish(run, loop.result())
    except StoppedError:
        raise
    except (PatchloomError, OSError) as error:
        raise loop.stopped(error) from error


def _restore(run: Run, loop: Loop) -> dict[str, Any]:
    """Restore the last whole checkpoint, which the main process finds for all. Returns what it records of its run."""
    processes = loop.processes
    # An error of one process alone would leave the others waiting: it is sent to all, and all raise it.
    path, problem = processes.gather(_newest(run, loop.console) if processes.is_main_process else None)[0]
    if problem is not None:
        raise PatchloomError(problem)
    if path is None:
        if (run.folder / "log.jsonl").exists():
            loop.console.say(f"{run.folder} has no checkpoint: the run begins at its start.")
        return {}
    # Each process reads the file itself; on several machines the folder may not be shared.
    if not path.exists():
        raise PatchloomError(f"Process {processes.rank} does not see {path}: is the folder shared by all of them?")
    state = _read_fitting(path, run, loop)
    if loop.counters.step < loop.total:
        loop.console.say(f"Resuming {run.folder} at step {loop.counters.step} of {loop.total}.")
    return dict(state.info.get("run", {}))


def _read_fitting(path: Path, run: Run, loop: Loop) -> State:
    """Restore a checkpoint whose settings are those of recipe.yaml."""
    try:
        state = read_checkpoint(path, loop.tensors.empty)
        run.check_unedited(state.info.get("run", {}), _as_written_today)
        loop.restore(state)
    except (RuntimeError, KeyError) as error:
        raise PatchloomError(f"The checkpoint of {run.folder} does not fit its recipe.yaml: {error}.") from error
    return state


def _as_written_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version under the names that this one writes, so that the two can be compared."""
    return {**settings, **settings_of(config_from_settings(settings))} if settings else {}


def _report_versions(before: Mapping[str, Any], console: Console) -> None:
    changed = [
        f"{name} {version or 'not installed'} (was {before[name] or 'not installed'})"
        for name, version in packages().items()
        if name in before and before[name] != version
    ]
    if changed:
        console.say(
            f"Library versions have changed since the checkpoint: {', '.join(changed)}. Results may differ slightly."
        )


def _is_finished(run: Run, loop: Loop) -> bool:
    """Whether all steps are trained, evaluated, reported and exported; model.json is written last."""
    written = all((run.folder / name).exists() for name in ("report.html", "export/model.safetensors"))
    done = loop.counters.step == loop.counters.evaluated == loop.total
    return written and done and exported_step(run.folder / "export") == loop.total


def _newest(run: Run, console: Console) -> tuple[Path | None, str | None]:
    """The last whole checkpoint, or what is wrong."""
    try:
        return run.checkpoints.newest(console.say), None
    except PatchloomError as error:
        return None, str(error)
