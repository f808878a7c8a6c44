"""CSV manifests: a column `path` and columns of labels."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from patchloom.data.listing import (
    LAYOUTS,
    SPLIT_NAMES,
    Labels,
    Row,
    Rows,
    choose_columns,
    class_columns,
    class_notes,
    label_by_name,
)
from patchloom.data.sources import FileSource, Source
from patchloom.errors import PatchloomError
from patchloom.reading import read_file
from patchloom.text import count

_MOST = 1 << 30  # bytes; a row per image of ImageNet takes 100 MB


def open_manifest(where: str, path: Path, labels: Labels = None, targets: str = "class") -> Source:
    """The images that a CSV file lists, with one or several columns of labels.

    Paths are relative to the folder of the manifest, or absolute. An optional column `split` has train, val or test.

    Raises:
        PatchloomError: not a CSV file, columns are missing or empty, or an image has two labels.
    """
    if path.suffix.lower() != ".csv":
        raise PatchloomError(f"{where} is a file, but not a CSV manifest (FILE.csv).", *LAYOUTS)
    rows, header = _read_rows(where, path)
    available = [name for name in header if name not in ("path", "split")]
    chosen, notes = _label_columns(where, rows, available, labels, targets)
    found: dict[str, list[Row]] = defaultdict(list)
    seen: dict[str, tuple[tuple[str, ...], int]] = {}
    counted: set[tuple[str, str]] = set()
    for line, row in rows:
        key, names, split = _manifest_row(where, path, line, row, chosen, "split" in header)
        # One image may be in two splits or rows, but with one label only.
        before, at = seen.setdefault(key, (names, line))
        if before != names:
            was, now = (", ".join(map(repr, some)) for some in (before, names))
            raise PatchloomError(f"{where}: {key} is {was} in line {at} and {now} in line {line}.")
        if (split, key) not in counted:
            counted.add((split, key))
            found[split].append((key, names))
    if not found:
        raise PatchloomError(f"{where} has a header and no rows.")
    in_order: Rows = {split: found[split] for split in ("train", "val", "test", "all") if split in found}
    columns = class_columns(chosen, in_order, sorted, targets)
    splits = label_by_name(where, columns, in_order)
    class_names = next(iter(columns.values()), [])
    if repeated := len(rows) - len(counted):
        notes.append(f"{count(repeated, 'row')} repeated an earlier one and counted once.")
    notes += class_notes(class_names, splits)
    return FileSource(path.parent, where, class_names, splits, notes, columns)


def _label_columns(
    where: str, rows: list[tuple[int, dict[str, str]]], available: list[str], labels: Labels, targets: str
) -> tuple[tuple[str, ...], list[str]]:
    """The columns of labels, and notes. A column that nobody asked for by name may have gaps with targets "none"."""
    chosen = choose_columns(where, available, labels, targets)
    if targets == "none" and labels is None:
        if gaps := sum(not row[name].strip() for _, row in rows for name in chosen):
            return (), [f"{count(gaps, 'row')} without a value for {chosen[0]!r}: the labels are not used."]
        if len(available) > 1:
            return (), [f"Columns {', '.join(available)}: none was chosen with --labels, so no labels are used."]
    return chosen, []


def _read_rows(where: str, path: Path) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
    try:
        # utf-8-sig: spreadsheets write a byte-order mark, which would become a part of the first column's name.
        with io.StringIO(read_file(path, _MOST).decode("utf-8-sig"), newline="") as file:
            # strict: a quote that is never closed is an error instead of one long cell.
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header_row(where, header)
            rows = []
            for cells in reader:
                # Empty lines at the end are common in exported tables.
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise PatchloomError(
                        f"{where}, line {reader.line_num}: {count(len(cells), 'value')} for "
                        f"{len(header)} columns ({', '.join(header)})."
                    )
                # A NUL byte would end the name of a file inside the operating system.
                if any("\0" in cell for cell in cells):
                    raise PatchloomError(f"{where}, line {reader.line_num}: there is a NUL byte in it.")
                rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
            return rows, header
    except (UnicodeDecodeError, csv.Error) as error:
        raise PatchloomError(f"{where} cannot be read as a CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise PatchloomError(f"{where} cannot be read: {error.strerror or error}") from error


def _check_header_row(where: str, header: list[str]) -> None:
    if "path" not in header:
        columns = ", ".join(header)[:200] or "none"
        raise PatchloomError(f"{where} has no column `path` in its first line; columns: {columns}.", *LAYOUTS)
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise PatchloomError(f"{where} has the column {twice[0]!r} more than once.")


def _manifest_row(
    where: str, path: Path, line: int, row: dict[str, str], columns: Sequence[str], has_split: bool
) -> tuple[str, tuple[str, ...], str]:
    """Key, the name of the class in each column, and split."""
    for name in ("path", *columns, *(["split"] if has_split else [])):
        if not row[name].strip():
            raise PatchloomError(f"{where}, line {line}: no value for {name!r}.")
    split = "all"
    if has_split:
        given = row["split"].strip()
        if given.lower() not in SPLIT_NAMES:
            raise PatchloomError(f"{where}, line {line}: split {given!r}; it must be train, val or test.")
        split = SPLIT_NAMES[given.lower()]
    return _manifest_key(path.parent, row["path"].strip()), tuple(row[column].strip() for column in columns), split


def _manifest_key(folder: Path, given: str) -> str:
    """Relative to the manifest where that is possible, so that a key stays the same when the data moves."""
    if os.path.isabs(given):
        plain = Path(os.path.normpath(given))
        here = Path(os.path.abspath(folder))
        return (plain.relative_to(here) if plain.is_relative_to(here) else plain).as_posix()
    return Path(os.path.normpath(given)).as_posix()
