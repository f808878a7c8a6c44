"""Helpers of the commands: parsers with grouped options and examples, tables, JSON, output folders."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.terminal import printable
from patchloom.text import without_nan

MODEL_HELP = "run folder, exported model, checkpoint, weight file or published tag such as deit_tiny.fb_in1k"
DATA_HELP = "folder with one subfolder per class, CSV file, 'digits', or another source (see docs/data.md)"
JSON_HELP = "print JSON instead of text"


def add_command(
    commands: Any, name: str, shared: argparse.ArgumentParser, purpose: str, examples: Sequence[str], **options: Any
) -> argparse.ArgumentParser:
    """Add a command whose --help begins with its purpose and ends with examples to paste.

    `purpose` is a phrase in lower case without a full stop, as the list of commands shows it; `options` are further
    arguments of `add_parser`.
    """
    return commands.add_parser(
        name,
        parents=[shared],
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=_HelpFormatter,
        **options,
    )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # The epilog comes through here too, and its lines are to be pasted as they are.
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def add_device(parser: argparse._ActionsContainer, default: str = "auto", purpose: str = "to compute on") -> None:
    """--device, which every command that computes has; its value is for `patchloom.devices.choose_device`."""
    meaning = (
        "an accelerator if there is one, else the CPU" if default == "auto" else "on which the exported file runs too"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        default=default,
        help=f"device {purpose}: auto, cpu, cuda, cuda:1, mps, xpu, ... (default: {default}, {meaning})",
    )


def is_main_process() -> bool:
    """Whether this process prints: the only one, or the first of a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines with aligned columns. The columns `right` are aligned to the right; the last column is not padded."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(_padded(row[i], width, i in right) for i, width in enumerate(widths)), row[-1]]).rstrip()
        for row in rows
    ]


def _padded(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def print_json(value: Any) -> None:
    """Print a value as JSON, with null in place of NaN and infinity, which JSON cannot express."""
    print(json.dumps(without_nan(value), indent=1, allow_nan=False))


def out_folder(name: str) -> Path:
    """The folder of --out, created if necessary; raises PatchloomError if that fails."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PatchloomError(f"Cannot create the folder --out {name}: {error.strerror}.") from error
    return Path(name)
