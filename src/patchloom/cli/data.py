"""`patchloom data`: look at data before training on it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.cli.output import print_json
from patchloom.terminal import print_lines

_SHOWN = 10  # pairs of duplicates, and classes, before the rest is counted


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("data", help="look at data before training on it")
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(parts, shared)
    _add_show(parts, shared)


def _add_show(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = parts.add_parser(
        "show",
        parents=[shared],
        help="a picture of what training would see",
        usage="patchloom data show DATA --recipe R --out FILE.png [key=value ...]",
    )
    add_data_options(parser)
    parser.add_argument("--recipe", required=True, help="a name of `patchloom recipes`")
    parser.add_argument("--model", default="deit_nano", help="whose image size; default deit_nano, 32 pixels")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="the picture to write")
    parser.set_defaults(run=show, settings=[])


def show(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.registry import find_recipe
    from patchloom.tasks.registry import task_for_recipe

    task = task_for_recipe(find_recipe(options.recipe))
    if task.show is None:
        raise PatchloomError(f"{options.recipe} is a recipe for {task.name}, whose data cannot be shown as a picture.")
    settings = parse_words(options.settings, task.options)
    sheet = task.show(options.data, options.recipe, options.out, options.model, options.labels, *settings)
    print_lines(f"The sheet is {sheet}")


def _add_check(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = parts.add_parser("check", parents=[shared], help="decode every image and report what is there")
    add_data_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs: one object")
    parser.set_defaults(run=check)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """DATA and --labels, for every part of this command."""
    parser.add_argument(
        "data", metavar="DATA", help="a folder of classes, a CSV manifest, digits, or a prefix: see docs"
    )
    parser.add_argument("--labels", metavar="COLUMN", help="the column of labels, where there are several")


def check(options: argparse.Namespace) -> None:
    from patchloom.data.check import check_data
    from patchloom.data.opening import open_source  # torch is imported only here

    report = check_data(open_source(options.data, options.labels), _progress if sys.stderr.isatty() else None)
    print_json(report) if options.json else print_lines(*_summary(report))


def _progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} images", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _summary(report: dict[str, Any]) -> list[str]:
    from patchloom.data.check import ACROSS, pair_lines
    from patchloom.text import count

    splits = ", ".join(f"{name} {number}" for name, number in report["splits"].items() if name != "all")
    classes = count(len(report["classes"]), "class", "classes")
    lines = [f"{report['data']}: {count(report['count'], 'image')} in {classes}"]
    lines += [f"  splits      {splits}"] if splits else []
    lines += [f"  classes     {_classes(report)}"]
    if report["count"]:
        width, height = report["sizes"]["width"], report["sizes"]["height"]
        lines += [
            f"  width       {width['min']} to {width['max']}, half of them up to {width['median']:g}",
            f"  height      {height['min']} to {height['max']}, half of them up to {height['median']:g}",
            f"  modes       {', '.join(f'{mode} {count}' for mode, count in report['modes'].items())}",
            f"  imbalance   the largest class has {report['imbalance']:g} times the images of the smallest",
        ]
    lines += [f"  note        {note}" for note in report["notes"]]
    pairs = {
        ACROSS: "duplicates",
        "duplicate images on one side of the split": "duplicates_within",
        "images that look almost the same": "near_duplicates",
    }
    for what, name in pairs.items():
        lines += pair_lines(what, report[name], "--json lists all")
    bad = report["unreadable"]
    lines += [f"{count(len(bad), 'file')} cannot be read:" if bad else "Every image can be read."]
    return [*lines, *(f"  {entry['path']}: {entry['reason']}" for entry in bad)]


def _classes(report: dict[str, Any]) -> str:
    ordered = sorted(report["classes"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name} {count}" for name, count in ordered[:_SHOWN])
    return shown + (f", and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")
