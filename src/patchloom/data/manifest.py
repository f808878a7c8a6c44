"""CSV manifests: a column `path` and columns of labels."""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from patchloom.data.listing import LAYOUTS, SPLIT_NAMES, Rows, class_notes, label_by_name
from patchloom.data.sources import FileSource, Source
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.text import count


def open_manifest(where: str, path: Path, labels: str | None) -> Source:
    if path.suffix.lower() != ".csv":
        raise PatchloomError(f"{where} is a file, but no CSV manifest (FILE.csv).", *LAYOUTS)
    rows, header = _read_rows(where, path)
    column = label_column(where, [name for name in header if name not in ("path", "split")], labels)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    seen: dict[str, tuple[str, int]] = {}
    counted: set[tuple[str, str]] = set()
    for line, row in rows:
        key, name, split = _manifest_row(where, path, line, row, column, "split" in header)
        before, at = seen.setdefault(key, (name, line))
        if before != name:
            raise PatchloomError(f"{where}: {key} is {before!r} in line {at} and {name!r} in line {line}.")
        if (split, key) not in counted:
            counted.add((split, key))
            found[split].append((key, name))
    if not found:
        raise PatchloomError(f"{where} has a header and no rows.")
    in_order: Rows = {split: found[split] for split in ("train", "val", "test", "all") if split in found}
    trained = in_order.get("train") or [row for rows_ in in_order.values() for row in rows_]
    class_names = sorted({name for _, name in trained})
    splits = label_by_name(where, class_names, in_order)
    repeated = len(rows) - len(counted)
    notes = [f"{count(repeated, 'row')} repeated an earlier one and counted once."] if repeated else []
    return FileSource(path.parent, where, class_names, splits, [*notes, *class_notes(class_names, splits)])


def _read_rows(where: str, path: Path) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header_row(where, header)
            rows = []
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise PatchloomError(
                        f"{where}, line {reader.line_num}: {count(len(cells), 'value')} for "
                        f"{len(header)} columns ({', '.join(header)})."
                    )
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


def label_column(where: str, columns: Sequence[str], labels: str | None) -> str:
    """The column of labels: the one asked for, or the only one."""
    listed = ", ".join(columns) or "none"
    if labels is not None and labels not in columns:
        raise PatchloomError(
            f"{where} has no label column {labels!r}.{did_you_mean(labels, columns)} Label columns: {listed}."
        )
    if labels is not None:
        return labels
    if len(columns) != 1:
        raise PatchloomError(f"{where} must say which column holds the labels (--labels COLUMN). Columns: {listed}.")
    return columns[0]


def _manifest_row(
    where: str, path: Path, line: int, row: dict[str, str], column: str, has_split: bool
) -> tuple[str, str, str]:
    for name in ("path", column, *(["split"] if has_split else [])):
        if not row[name].strip():
            raise PatchloomError(f"{where}, line {line}: no value for {name!r}.")
    split = "all"
    if has_split:
        said = row["split"].strip()
        if said.lower() not in SPLIT_NAMES:
            raise PatchloomError(f"{where}, line {line}: split {said!r}; it must be train, val or test.")
        split = SPLIT_NAMES[said.lower()]
    return _manifest_key(path.parent, row["path"].strip()), row[column].strip(), split


def _manifest_key(folder: Path, said: str) -> str:
    """Relative to the manifest where that is possible, so that a key stays the same when the data moves."""
    if os.path.isabs(said):
        plain = Path(os.path.normpath(said))
        here = Path(os.path.abspath(folder))
        return (plain.relative_to(here) if plain.is_relative_to(here) else plain).as_posix()
    return Path(os.path.normpath(said)).as_posix()
