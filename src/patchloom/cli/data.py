"""`patchloom data`: look at data before training on it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from patchloom.cli.output import print_json

_SHOWN = 10  # pairs of duplicates, and classes, before the rest is counted


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("data", help="look at data before training on it")
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(parts, shared)
    _add_show(parts, shared)


def _add_show(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = parts.add_parser("show", parents=[shared], help="a picture of what training would see")
    add_data_options(parser)
    parser.add_argument("--recipe", required=True, help="a name of `patchloom recipes`")
    parser.add_argument("--model", default="deit_nano", help="whose image size; default deit_nano, 32 pixels")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="the picture to write")
    parser.set_defaults(run=show, settings=[])


def show(options: argparse.Namespace) -> None:
    from patchloom.tasks.show import write_sheet

    sheet = write_sheet(options.data, options.recipe, options.out, options.model, options.labels, options.settings)
    print(f"The sheet is {sheet}")


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
    from patchloom.data.sources import open_source  # torch is imported only here

    report = check_data(open_source(options.data, options.labels), _progress if sys.stderr.isatty() else None)
    print_json(report) if options.json else print(_printable(_summary(report)))


def _progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} images", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Names of files may hold what the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _summary(report: dict[str, Any]) -> str:
    splits = ", ".join(f"{name} {count}" for name, count in report["splits"].items() if name != "all")
    classes = _number(len(report["classes"]), "class", "classes")
    lines = [f"{report['data']}: {_number(report['count'], 'image')} in {classes}"]
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
    lines += _pairs("equal images on both sides of the split", report["duplicates"])
    lines += _pairs("equal images on one side of the split", report["duplicates_within"])
    lines += _pairs("images that look almost the same", report["near_duplicates"])
    bad = report["unreadable"]
    lines += [f"{_number(len(bad), 'file')} cannot be read:" if bad else "Every image can be read."]
    return "\n".join([*lines, *(f"  {entry['path']}: {entry['reason']}" for entry in bad)])


def _classes(report: dict[str, Any]) -> str:
    ordered = sorted(report["classes"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name} {count}" for name, count in ordered[:_SHOWN])
    return shown + (f", and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def _pairs(what: str, pairs: list[list[str]]) -> list[str]:
    if not pairs:
        return []
    more = [f"  and {len(pairs) - _SHOWN} more (--json lists all)"] if len(pairs) > _SHOWN else []
    return [f"{_number(len(pairs), 'pair')} of {what}:", *(f"  {one}  {other}" for one, other in pairs[:_SHOWN]), *more]


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
