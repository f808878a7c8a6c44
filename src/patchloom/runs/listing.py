"""The list of runs: status, progress and metrics of each."""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.recipes.changes import is_set_for_run
from patchloom.tasks.registry import find_task
from patchloom.temporary import write_text
from patchloom.training.failures import read_failure
from patchloom.training.report import epoch_records
from patchloom.training.run import Run
from patchloom.training.task import Metric
from patchloom.weights.files import exported_step

KEYS = ("run", "task", "model", "recipe", "changes", "epochs", "metric", "last", "best", "seconds", "status")
_FILES = ("recipe.yaml", "log.jsonl", "environment.json")  # one of them makes a folder a run
_TYPES = {  # settings that the list shows; old or other kinds of runs lack some
    "task": str, "recipe_name": str, "epochs": int, "steps": int | None, "sources": dict | None,
    "model_options": dict | None,
}  # fmt: skip
_INSIDE = ("checkpoints", "export", "tensorboard")  # folders of a run


@dataclass
class RunInfo:
    """One run folder. What cannot be read is empty, and `problem` says why."""

    folder: Path
    status: str = "damaged"
    problem: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)  # one per epoch

    @property
    def task_metric(self) -> Metric:
        """What the run is measured by: as it recorded, or as its kind of task is."""
        try:
            return Metric(**self.environment["metric"])
        except (KeyError, TypeError):
            return find_task(self.settings["task"]).metric

    @property
    def metric(self) -> str | None:
        """The name in log.jsonl: of the averaged weights where there are any, and without a metric the loss."""
        names = _metric_names(self.task_metric) if self.settings else ()
        return next((name for name in names if self.records and name in self.records[-1]), None)

    def metric_text(self, name: str | None, value: float | None) -> str:
        """A value of the log for people."""
        if value is None:
            return "-"
        is_metric = name is not None and name.removeprefix("ema_") == self.task_metric.name
        return f"{value:.2%}" if is_metric and self.task_metric.percent else f"{value:.4g}"

    def curve(self, name: str | None) -> list[tuple[int, float]]:
        """(epoch, value) of a metric."""
        return [(row["epoch"], row[name]) for row in self.records if name in row]

    @property
    def best(self) -> tuple[int, float] | None:
        """The epoch with the best value of the metric, the first of several, and the value."""
        if self.metric is None:
            return None
        sign = 1 if self.metric != "train_loss" and self.task_metric.higher_is_better else -1
        # max gives the first of equal ones.
        return max(self.curve(self.metric), key=lambda point: sign * point[1], default=None)

    @property
    def epochs(self) -> int | None:
        """The epochs that are done."""
        if self.status == "damaged" or not self.settings:
            return None
        return int(self.records[-1]["epoch"]) if self.records else 0

    @property
    def seconds(self) -> float | None:
        """From the start of the run to its last record, pauses included."""
        try:
            start = datetime.strptime(self.environment["date"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            return max(0.0, round(self.records[-1]["time"] - start, 1))
        except (KeyError, IndexError, TypeError, ValueError):
            return None

    @property
    def changes(self) -> dict[str, Any] | None:
        """The settings that were given, as `key: value`; None where they cannot be read."""
        if not self.settings:
            return None
        sources, options = self.settings.get("sources") or {}, self.settings.get("model_options") or {}
        named = {name: self.settings.get(name) for name, source in sources.items() if is_set_for_run(source)}
        return {**named, **{f"model.{name}": value for name, value in options.items()}}

    def row(self) -> dict[str, Any]:
        """What `patchloom runs --json` promises: `KEYS`, in this order."""
        curve, settings = self.curve(self.metric), self.settings
        values = (
            str(self.folder), settings.get("task"), (settings.get("model") or {}).get("name"),
            settings.get("recipe_name"), self.changes, self.epochs, self.metric,
            curve[-1][1] if curve else None, self.best and self.best[1], self.seconds, self.status,
        )  # fmt: skip
        return dict(zip(KEYS, values, strict=True))


def list_runs(places: Iterable[str | PathLike[str]]) -> list[RunInfo]:
    """The runs in these folders and below them, each once, in the order of their names.

    Raises:
        PatchloomError: a place is not a folder. Damaged runs are listed as such.
    """
    found: dict[Path, RunInfo] = {}
    for place in places:
        if not os.fspath(place) or not Path(place).is_dir():
            raise PatchloomError(f"There is no folder {str(place)!r} to look for runs in.")
        for folder in _run_folders(Path(place)):
            if (where := folder.resolve()) not in found:
                found[where] = read_run(folder)
    return list(found.values())


def _run_folders(place: Path) -> Iterator[Path]:
    """Links to folders are not followed, so that the search ends."""
    for name, folders, files in os.walk(place):
        is_run = any(file in files for file in _FILES)
        # Changing the list in place tells os.walk where not to go.
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not (is_run and f in _INSIDE))
        if is_run:
            yield Path(name)


def read_run(folder: Path) -> RunInfo:
    """The run in a folder, whatever its state."""
    info = RunInfo(folder)
    # Checked first: if no process trains here, the files read below do not change any more.
    running = is_running(folder)
    try:
        run = Run.open(folder)
        _check(run.settings, folder / "recipe.yaml")
        info.settings = run.settings
        info.environment = run.environment()
        info.records = [_checked(row, run) for row in epoch_records(run)]
    except (PatchloomError, ValueError, OSError, RecursionError) as error:
        if not (running and not (folder / "recipe.yaml").exists()):  # not begun yet
            info.problem = str(error)
            return info
    info.status = "running" if running else _ended(info)
    return info


def _check(settings: dict[str, Any], path: Path) -> None:
    missing = [name for name in ("task", "recipe_name", "epochs") if name not in settings]
    wrong = [name for name, kind in _TYPES.items() if name in settings and not isinstance(settings[name], kind)]
    model, sources = settings.get("model"), settings.get("sources") or {}
    if not isinstance(model, dict) or not isinstance(model.get("name"), str | None):
        wrong.append("model")
    if isinstance(sources, dict) and not all(isinstance(source, str) for source in sources.values()):
        wrong.append("sources")
    if missing or wrong:
        raise PatchloomError(f"{path} is damaged: {', '.join([*missing, *wrong])} is missing or wrong.")
    find_task(settings["task"])  # one of a newer version is refused


def _checked(row: dict[str, Any], run: Run) -> dict[str, Any]:
    """A record whose values the list can show."""
    spec, path = find_task(run.settings["task"]), run.folder / "log.jsonl"
    names = {*_metric_names(spec.metric), *spec.curves, "lr"} & set(row)
    numbers = [row.get("epoch"), row.get("step"), *(row[name] for name in names)]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise PatchloomError(f"{path} is damaged: a record has no epoch or no step, or a value is not a number.")
    try:
        spec.summary(row)
    except (TypeError, ValueError, KeyError) as error:
        raise PatchloomError(f"{path} is damaged: a record cannot be shown ({error!r}).") from error
    return row


def _metric_names(metric: Metric) -> tuple[str, ...]:
    """Names in log.jsonl that say how good a run is, the best first."""
    return f"ema_{metric.name}", metric.name, "train_loss"


def is_running(folder: Path) -> bool:
    """Whether a process trains in the folder: it holds the lock, which goes with it however it ends."""
    try:
        # Never created here: looking at runs must not write. No links or FIFOs: other users may own the folder.
        lock = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A shared lock for a moment: two people may list runs at once without taking each other for a trainer.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)


def _ended(info: RunInfo) -> str:
    """The status of a run that no process trains."""
    failure = read_failure(info.folder)
    if not info.records and (info.folder / "export" / "model.json").is_file():
        info.problem = f"{info.folder / 'log.jsonl'} is missing or has no records, although the run was exported."
        return "damaged"
    if info.records and _trained(info.records[-1], info.settings) and _exported(info):
        return "finished"
    if failure is None:
        return "interrupted"
    info.problem = str(failure.get("error", "the reason is not known"))
    return "failed"


def _trained(record: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a record of the log is that of the last step."""
    steps = settings.get("steps")
    return bool(record["epoch"] >= settings["epochs"] if steps is None else record["step"] >= steps)


def _exported(info: RunInfo) -> bool:
    """Whether export and report are there, and are those of the last epoch."""
    step = info.records[-1]["step"]
    return exported_step(info.folder / "export") == step and (info.folder / "report.html").is_file()


def write_csv(runs: Sequence[RunInfo], path: Path) -> None:
    """One line per run, with the columns `KEYS`; changes as key=value words."""
    text = io.StringIO()
    writer = csv.DictWriter(text, KEYS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerow({**run.row(), "changes": changes_text(run.changes)})
    write_file(path, text.getvalue())


def changes_text(changes: dict[str, Any] | None) -> str:
    """The changes as the words that `patchloom train` takes."""
    return " ".join(f"{name}={_word(value)}" for name, value in (changes or {}).items())


def _word(value: Any) -> str:
    """A value as `train` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def write_file(path: Path, text: str) -> None:
    """`write_text` with the project's own error."""
    with errors_in_writing(path):
        write_text(path, text)
