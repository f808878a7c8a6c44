"""Carry a job out: from an empty folder, or from its last checkpoint, to the export and the report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.console import Console
from patchloom.data.splits import Split, split_source
from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.models.registry import build
from patchloom.reading import read_json
from patchloom.runs.config import Job, Start
from patchloom.tasks.classification.distillation import Distill
from patchloom.tasks.classification.report import write_report
from patchloom.tasks.classification.setup import make_task, open_data, source_of
from patchloom.tasks.classification.task import Classify
from patchloom.training.checkpoints import State, read_checkpoint
from patchloom.training.failures import noted_failure
from patchloom.training.loggers import check_log, open_mirrors
from patchloom.training.loop import Loop
from patchloom.training.processes import join_processes, restarted
from patchloom.training.run import Run, packages, write_text
from patchloom.training.sharding import whole_tensors
from patchloom.weights.files import kept_checkpoints
from patchloom.weights.load import load
from patchloom.weights.save import save, save_delta


def carry_out(
    job: Job,
    out: str | PathLike[str],
    *,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
) -> Run:
    """Begin a run in the folder `out`, and train to its end."""
    if restarted() and (Path(out) / "recipe.yaml").exists():
        return resume(out, console)
    processes = join_processes()
    console = console or Console()
    console.quiet = console.quiet or not processes.first
    for note in job.notes:
        console.say(note)
    check_free(out)
    check_log(log)
    source, split, bad = open_data(job, console, processes, strict)
    job = dataclasses.replace(job, splits=dataclasses.replace(job.splits, train=split.train_name, test=split.test_name))
    task = make_task(job, source, split, processes, console)
    run = Run(Path(out), {**job.settings(), "log": log})
    loop = Loop(task, job.recipe, run, processes, console)  # before anything is written: it refuses what cannot be
    processes.wait()
    with run.locked() if processes.first else nullcontext():
        if processes.first:
            check_free(out)  # again: another process may have begun a run here meanwhile
            run.create({"data": _about_data(job, split, bad), "teachers": _about_teachers(task)})
        return _go_on(run, job, task, loop)


def resume(folder: str | PathLike[str], console: Console | None = None, more_epochs: int = 0) -> Run:
    """Go on with a run from its last checkpoint, exactly; with `more_epochs`, beyond its end."""
    run = Run.open(Path(folder))
    processes = join_processes()
    console = console or Console()
    console.quiet = console.quiet or not processes.first
    try:
        job = Job.from_settings(run.settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{run.folder / 'recipe.yaml'} is damaged: {error!r}.") from error
    environment = run.about()
    run.records()  # a damaged log is told before hours of training
    if more_epochs:
        job = _extended(job, more_epochs, console)
    if environment["data"].get("fingerprint") != source_of(job).fingerprint():
        raise PatchloomError(
            f"{job.data} has changed since {run.folder} began: exact resuming needs the same images and labels."
        )
    source = source_of(job).without(environment["data"].get("skipped", {}))
    begun = bool(kept_checkpoints(run.checkpoints.folder))
    task = make_task(job, source, split_source(source, job.splits), processes, console, begin=not begun)
    if environment.get("teachers", []) != _about_teachers(task):
        raise PatchloomError(f"A teacher has changed since {run.folder} began: exact resuming needs the same.")
    if job.start is not None and job.start.delta:
        _base_of(job.start)  # missed now rather than after the last epoch
    loop = Loop(task, job.recipe, run, processes, console)
    with run.locked() if processes.first else nullcontext():
        identity = {"packages": environment.get("packages")} | _restore(run, loop)
        _tell_versions(identity["packages"] or {}, console)
        run.settings |= job.settings()
        if processes.gather(_is_finished(run, loop))[0]:  # files may reach the others late
            console.say(
                f"{run.folder} is finished: {job.recipe.epochs} epochs. `patchloom extend {run.folder} --epochs N` "
                "adds some."
            )
            return run
        if more_epochs and processes.first:
            run.extend(job.recipe.epochs)
        return _go_on(run, job, task, loop)


def _extended(job: Job, more: int, console: Console) -> Job:
    epochs = job.recipe.epochs + more
    how = {
        "constant": "the learning rate stays as it is",
        "step": f"the drops of the learning rate stay at epochs {', '.join(map(str, job.recipe.decay_epochs))}",
    }.get(
        job.recipe.schedule,
        f"its {job.recipe.schedule} curve spans all of them, and the learning rate goes on from where that curve is at "
        "the last checkpoint",
    )
    console.say(f"The schedule changes to {epochs} epochs instead of {job.recipe.epochs}: {how}.")
    return dataclasses.replace(job, recipe=job.recipe.replace(epochs=epochs))


def _about_data(job: Job, split: Split, bad: dict[str, str]) -> dict[str, Any]:
    """What a run remembers of its data: enough to notice a change, and which images it never saw."""
    about = {"where": job.data, "fingerprint": source_of(job).fingerprint(), "skipped": bad, "split": split.summary}
    if split.test_name is None:
        about["held_out"] = [item.key for item in split.held_out]
    return about


def _about_teachers(task: Classify) -> list[Any]:
    """What a run remembers of its teachers, as JSON gives it back."""
    identities = [one.identity for one, _ in task.teachers.teachers] if isinstance(task, Distill) else []
    return list(json.loads(json.dumps(identities)))


def _base_of(start: Start) -> Network:
    return load(start.weights, **start.hints)


def check_free(place: str | PathLike[str]) -> None:
    """Refuse before hours of reading what would be refused after them."""
    if not os.fspath(place):
        raise PatchloomError("--out is empty. Give the name of a folder for the run.")
    out = Path(place)
    if (out / "recipe.yaml").exists() or (out / "checkpoints").exists():
        raise PatchloomError(
            f"{out} holds a run already: `patchloom resume {out}` goes on with it, or give another folder for this run."
        )
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PatchloomError(f"{out} cannot be written: {existing} is no folder that this user may write to.")


def _go_on(run: Run, job: Job, task: Classify, loop: Loop) -> Run:
    """From where the loop is to the report; this process has the lock of the folder."""
    processes = loop.processes
    if processes.first:
        run.renew()
        run.mirrors = open_mirrors(run.folder, run.settings, loop.counters.step)
    processes.wait()
    with noted_failure(run.folder, processes.first):
        try:
            loop.fit()
        finally:
            for mirror in run.mirrors:
                mirror.close()
        _finish(run, job, task, loop)
    return run


def _restore(run: Run, loop: Loop) -> dict[str, Any]:
    """The first process looks for the last whole checkpoint; all take that one. What it remembers of its run."""
    processes = loop.processes
    path, problem = processes.gather(_newest(run, loop.console) if processes.first else None)[0]
    if problem is not None:
        raise PatchloomError(problem)
    if path is None:
        if (run.folder / "log.jsonl").exists():
            loop.console.say(f"{run.folder} has no checkpoint: the run begins at its start.")
        return {}
    if not path.exists():
        raise PatchloomError(f"Process {processes.rank} does not see {path}: is the folder shared by all of them?")
    state = _read_fitting(path, run, loop)
    if loop.counters.step < loop.total:
        loop.console.say(f"Resuming {run.folder} at step {loop.counters.step} of {loop.total}.")
    return dict(state.info.get("run", {}))


def _read_fitting(path: Path, run: Run, loop: Loop) -> State:
    """Restore a checkpoint whose settings are those of recipe.yaml."""
    try:
        state = read_checkpoint(path, loop.empty)
        run.check_unedited(state.info.get("run", {}))
        loop.restore(state)
    except (RuntimeError, KeyError) as error:
        raise PatchloomError(f"The checkpoint of {run.folder} does not fit its recipe.yaml: {error}.") from error
    return state


def _tell_versions(before: Mapping[str, Any], console: Console) -> None:
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
    """Whether all epochs are trained, evaluated, reported and exported; model.json is written last."""
    written = all((run.folder / name).exists() for name in ("report.html", "export/model.safetensors"))
    if not written or not loop.counters.step == loop.counters.evaluated == loop.total:
        return False
    try:
        return bool(read_json(run.folder / "export" / "model.json")["step"] == loop.total)
    except (PatchloomError, KeyError, TypeError):
        return False


def _newest(run: Run, console: Console) -> tuple[Path | None, str | None]:
    """The last whole checkpoint, or what is wrong."""
    try:
        return run.checkpoints.newest(console.say), None
    except PatchloomError as error:
        return None, str(error)


def _finish(run: Run, job: Job, task: Classify, loop: Loop) -> None:
    """The report and the export."""
    trained = loop.average.model if loop.average is not None else loop.network
    try:
        scores, whole = task.scores(trained) if task.split.held_out else None, whole_tensors(trained)
    except PatchloomError as error:
        raise loop.stopped(error) from error
    if not loop.processes.first:
        return
    network = build(trained.config)
    network.load_state_dict(whole)
    network.class_names, network.preprocessing = trained.class_names, trained.preprocessing
    kind = "averaged" if loop.average is not None else "raw"
    about = {
        "step": loop.counters.step,
        "weights": kind,
        "held_out": {key: value for key, value in scores.summary().items() if key != "per_class"} if scores else None,
        "best": loop.counters.best,
    }
    write_report(run, task.source, task.split.held_out, scores, network)
    if job.start is not None and job.start.delta:
        save_delta(network, run.folder / "export" / "delta.safetensors", _base_of(job.start), job.start.weights)
    export_network(run.folder / "export", network, about)  # last: with it a run is finished
    loop.console.say(f"The report is {run.folder / 'report.html'}, the {kind} weights are in {run.folder / 'export'}.")


def export_network(folder: Path, network: Network, about: Mapping[str, Any]) -> None:
    """model.safetensors, which says all itself, and model.json for those who read no safetensors."""
    save(network, folder / "model.safetensors")
    told = {
        "config": network.config.to_json(),
        "class_names": network.class_names,
        "preprocessing": network.preprocessing.to_json(),
        **about,
    }
    write_text(folder / "model.json", json.dumps(told, indent=1) + "\n")
