"""`patchloom data`: check and view data before training on it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.cli.output import DATA_HELP, JSON_HELP, add_command, print_json
from patchloom.errors import PatchloomError
from patchloom.terminal import print_lines

_SHOWN = 10  # classes that are listed; the others are counted


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "data",
        argparse.ArgumentParser(add_help=False),
        "check and view data before training on it",
        ["patchloom data check birds/", "patchloom data show birds/ --recipe deit@small --out sheet.png"],
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(parts, shared)
    _add_show(parts, shared)


def _add_show(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "show",
        shared,
        "write a contact sheet of training images, augmented as in the recipe",
        [
            "patchloom data show birds/ --recipe deit@small --out sheet.png",
            "patchloom data show digits --recipe deit@small --out sheet.png img_size=16",
        ],
        usage="patchloom data show DATA --recipe R --out FILE.png [key=value ...]",
    )
    add_data_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--recipe", metavar="NAME", required=True, help="recipe, see `patchloom recipes`")
    group.add_argument(
        "--model",
        metavar="NAME",
        default="deit_nano",
        help="model whose image size is used (default: deit_nano, 32 pixels)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--out", required=True, metavar="FILE.png", help="image file to write")
    parser.set_defaults(run=show, settings=[])


def show(options: argparse.Namespace) -> None:
    """Write the sheet."""
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.registry import find_recipe
    from patchloom.tasks.registry import task_for_recipe

    task = task_for_recipe(find_recipe(options.recipe))
    if task.show is None:
        raise PatchloomError(f"{options.recipe} is a recipe for {task.name}, whose data cannot be shown as a picture.")
    # Recipe settings and model options, in this order, as `task.show` takes them.
    settings = parse_words(options.settings, task.options)
    sheet = task.show(options.data, options.recipe, options.out, options.model, options.labels, *settings)
    print_lines(f"Wrote {sheet}")


def _add_check(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "check",
        shared,
        "decode every image and report sizes, classes, duplicates and unreadable files",
        ["patchloom data check birds/", "patchloom data check birds.csv --labels species --json"],
    )
    add_data_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=check)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add DATA and --labels, which all data commands have."""
    group = parser.add_argument_group("data")
    group.add_argument("data", metavar="DATA", help=DATA_HELP)
    group.add_argument("--labels", metavar="COLUMN", help="label column of a CSV file (default: the only one)")


def check(options: argparse.Namespace) -> None:
    """Check and print the report."""
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
            f"  width       {width['min']} to {width['max']}, median {width['median']:g}",
            f"  height      {height['min']} to {height['max']}, median {height['median']:g}",
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
