"""`patchloom runs`: a list of runs, or the details of one."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from patchloom.cli.output import add_command, print_json, table
from patchloom.console import duration
from patchloom.terminal import print_lines

if TYPE_CHECKING:
    from patchloom.runs.listing import RunInfo

_EPOCHS = 10  # that the details of one run show


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "runs",
        shared,
        "list runs with their settings, metrics and status, or show one in detail",
        ["patchloom runs runs/photos", "patchloom runs runs/ --html runs.html"],
    )
    parser.add_argument(
        "folders", metavar="DIR", nargs="*", default=["runs"], help="folders to search for runs (default: runs)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON, one object per run")
    group.add_argument("--csv", metavar="FILE", help="also write the table to a CSV file")
    group.add_argument("--html", metavar="FILE", help="also write a page with the curves of all runs and the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from patchloom.runs.listing import list_runs, write_csv
    from patchloom.runs.page import write_page

    runs = list_runs(options.folders)
    if options.csv is not None:
        write_csv(runs, Path(options.csv))
    if options.html is not None:
        write_page(runs, Path(options.html))
    if options.json:
        print_json([info.row() for info in runs])
    # One folder that is itself a run is shown in detail; a folder of runs is listed, even if it holds only one.
    elif len(runs) == 1 and [str(runs[0].folder)] == [str(Path(name)) for name in options.folders]:
        print_lines(*_details(runs[0]))
    elif runs:
        print_lines(*_table(runs))
    else:
        print_lines(f"No runs in {', '.join(options.folders)}.")


def _table(runs: list[RunInfo]) -> list[str]:
    from patchloom.runs.listing import changes_text

    head = ("run", "status", "model", "recipe", "epochs", "metric", "last", "best", "time", "changes")
    rows = [
        (
            str(info.folder), info.status, row["model"] or "-", row["recipe"] or "-", _epochs(info),
            row["metric"] or "-", *(info.metric_text(row["metric"], row[name]) for name in ("last", "best")),
            _time(info), changes_text(info.changes) or "-",
        )
        for info in runs
        for row in [info.row()]
    ]  # fmt: skip
    # Below the table, since a reason can be long.
    problems = [f"{info.folder} {info.status}: {info.problem}" for info in runs if info.problem]
    return [*table([head, *rows], right=(4, 6, 7, 8)), *problems]


def _details(info: RunInfo) -> list[str]:
    from patchloom.runs.listing import changes_text

    row, settings = info.row(), info.settings
    pairs = [
        ("status", info.status + (f": {info.problem}" if info.problem else "")),
        ("task", row["task"]),
        ("model", row["model"]),
        ("recipe", row["recipe"]),
        ("changes", changes_text(info.changes)),
        ("data", settings.get("data")),
        ("started", info.environment.get("date")),
        ("time", _time(info)),
        ("epochs", _epochs(info)),
        *_results(info),
        *_next(info),
    ]
    shown = [(name, str(value)) for name, value in pairs if value not in (None, "", "-")]
    return [str(info.folder), *(f"  {line}" for line in table(shown)), *_last_epochs(info)]


def _results(info: RunInfo) -> list[tuple[str, str]]:
    from patchloom.tasks.registry import find_task

    metric, best = info.metric, info.best
    if metric is None or best is None:
        return []
    last = info.records[-1]
    results = [
        (
            metric,
            f"{info.metric_text(metric, last[metric])}, best {info.metric_text(metric, best[1])} after epoch {best[0]}",
        )
    ]
    summary = find_task(info.settings["task"]).summary(last)
    return [*results, ("result", summary)] if summary else results


def _next(info: RunInfo) -> list[tuple[str, str]]:
    """What can be done with the run now."""
    from patchloom.tasks.registry import find_task

    if info.status == "finished":
        return [("report", str(info.folder / "report.html")), ("weights", str(info.folder / "export"))]
    if info.status not in ("interrupted", "failed"):
        return []
    if find_task(info.settings["task"]).from_python:
        return [("continue", "run the Python script that started it again")]
    return [("continue", f"patchloom resume {quote(str(info.folder))}")]


def _last_epochs(info: RunInfo) -> list[str]:
    from patchloom.tasks.registry import find_task

    curves = find_task(info.settings["task"]).curves if info.settings else ()
    names = [name for name in dict.fromkeys(("train_loss", *sorted(curves), "lr")) if info.curve(name)]
    if not names:
        return []
    rows = [
        (str(record["epoch"]), *(info.metric_text(name, record.get(name)) for name in names), "")
        for record in info.records[-_EPOCHS:]
    ]
    return ["", *table([("epoch", *names, ""), *rows], right=range(len(names) + 1))]


def _epochs(info: RunInfo) -> str:
    if info.epochs is None:
        return "-"
    if (steps := info.settings.get("steps")) is not None:
        return f"{info.records[-1]['step'] if info.records else 0}/{steps} steps"
    return f"{info.epochs}/{info.settings['epochs']}"


def _time(info: RunInfo) -> str:
    return "-" if info.seconds is None else duration(info.seconds)
