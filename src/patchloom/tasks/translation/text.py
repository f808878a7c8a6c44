"""Parallel text: files `STEM.LANGUAGE`, plain or with .gz, one sentence per line, line n of both the same sentence."""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.reading import read_file
from patchloom.text import count

Pair = tuple[str, str]  # source and target language
_MOST_BYTES = 1 << 34
_RATIO, _UNPACKED_ALLOWANCE = 50, 64 << 20  # text is compressed 3 to 10 times; any file may unpack to 64 MB
_NAMED = 5  # line numbers that a message gives


@dataclass(frozen=True)
class ParallelText:
    """Sentences of two languages, line by line; `stem` is the name of the files without the language."""

    folder: Path
    stem: str
    pair: Pair
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def keep(self, places: Sequence[int]) -> ParallelText:
        """The sentences at these places."""
        source, target = (tuple(lines[place] for place in places) for lines in (self.source, self.target))
        return ParallelText(self.folder, self.stem, self.pair, source, target)


def parse_pair(text: str) -> Pair:
    """("en", "de") from "en-de"."""
    match = re.fullmatch(r"([A-Za-z_]+)-([A-Za-z_]+)", text) if isinstance(text, str) else None
    if match is None or match[1] == match[2]:
        raise PatchloomError(f"A pair is a source and a target language, such as en-de, not {text!r}.")
    return match[1], match[2]


def read_parallel(folder: str | os.PathLike[str], stem: str, pair: Pair) -> ParallelText:
    """The sentences of `STEM.SOURCE` and `STEM.TARGET` in a folder.

    Raises PatchloomError for a missing file, files of different length, empty files, and text that is not UTF-8.
    Empty lines are kept.
    """
    folder = Path(folder)
    if not folder.is_dir():
        known = "is not a folder" if folder.exists() else "does not exist"
        raise PatchloomError(
            f"{folder} {known}: give a folder with files such as {stem}.{pair[0]} and {stem}.{pair[1]}."
        )
    files = [_find(folder, stem, language) for language in pair]
    source, target = (read_lines(file) for file in files)
    if len(source) != len(target):
        raise PatchloomError(
            f"{files[0]} has {count(len(source), 'line')} and {files[1].name} has {len(target)}: "
            "line n of both must be the same sentence."
        )
    if not source:
        raise PatchloomError(f"{files[0]} has no lines.")
    return ParallelText(folder, stem, pair, tuple(source), tuple(target))


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 text file, plain or .gz, without line ends and surrounding spaces."""
    try:
        content = read_file(path, _MOST_BYTES)
        if str(path).endswith(".gz"):
            content = _unpacked(content)
        # utf-8-sig also removes a byte-order mark, which would become a part of the first word.
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise PatchloomError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PatchloomError(f"Cannot read {path} as text: line {line} is not UTF-8.") from error
    # not splitlines(), which also splits at rare separators within a line
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.strip() for line in lines]


def _unpacked(content: bytes) -> bytes:
    """The content of a .gz file, unless it is far larger than any text becomes."""
    most = _UNPACKED_ALLOWANCE + _RATIO * len(content)
    with gzip.open(io.BytesIO(content)) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"its {len(content):,} bytes unpack to more than {most:,}")
    return text


def stems(folder: Path, pair: Pair) -> list[str]:
    """The stems for which a folder has files of both languages.

    Those of one language only are left out.
    """
    both = [{name.rsplit(".", 1)[0] for name in _names(folder) if name.endswith(f".{code}")} for code in pair]
    return sorted(both[0] & both[1])


def held_out_stem(folder: str | os.PathLike[str], pair: Pair) -> str:
    """The stem of the text that a run holds out: val, or test where there is no val."""
    found = stems(Path(folder), pair) if Path(folder).is_dir() else []
    return "test" if "val" not in found and "test" in found else "val"


def describe_lines(text: ParallelText, places: Sequence[int], what: str) -> str:
    """ "3 lines of train.en or train.de are empty (lines 4, 9, 12)", for messages."""
    line, verb = ("line", "is") if len(places) == 1 else ("lines", "are")
    numbers = ", ".join(str(place + 1) for place in places[:_NAMED]) + (", ..." if len(places) > _NAMED else "")
    names = " or ".join(f"{text.stem}.{language}" for language in text.pair)
    return f"{count(len(places), 'line')} of {names} {verb} {what} ({line} {numbers})"


def _find(folder: Path, stem: str, language: str) -> Path:
    for name in (f"{stem}.{language}", f"{stem}.{language}.gz"):
        if (folder / name).is_file():
            return folder / name
    names = _names(folder)
    languages = sorted({name.rsplit(".", 1)[1] for name in names if name.rsplit(".", 1)[0] == stem and "." in name})
    known = sorted({name.rsplit(".", 1)[0] for name in names if name.endswith(f".{language}")})
    if languages:
        hint = f" It has {stem} in {', '.join(languages)}.{did_you_mean(language, languages)}"
    elif known:
        hint = f" It has {', '.join(known)} in {language}.{did_you_mean(stem, known)}"
    else:
        hint = " It holds no text in this language: a folder for translation has one sentence per line in such files."
    raise PatchloomError(f"{folder} has no {stem}.{language} and no {stem}.{language}.gz.{hint}")


def _names(folder: Path) -> list[str]:
    """The names of the files in a folder, without .gz."""
    return [path.name.removesuffix(".gz") for path in folder.iterdir() if path.is_file()]
