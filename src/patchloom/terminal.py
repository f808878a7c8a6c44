"""What is written to a terminal: names of files and classes may hold characters that a terminal would obey."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

# line breaks and control characters, lone surrogates, and the marks that reorder text
_OBEYED = {"Cc", "Cs", "Zl", "Zp"}
_REORDERING = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def printable(text: str) -> str:
    r"""One line of text in which line breaks, escape sequences and the like are spelled out, as "\n" and "\x1b"."""
    # The usual case, at the speed of C.
    if text.isprintable():
        return text
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    obeyed = unicodedata.category(character) in _OBEYED or unicodedata.bidirectional(character) in _REORDERING
    return character.encode("unicode_escape").decode() if obeyed else character


def encodable(text: str, out: TextIO) -> str:
    """Text without what the encoding of `out` cannot show."""
    encoding = out.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print each of `lines` on one line, whatever names it holds."""
    out = file or sys.stdout
    print(*(encodable(printable(line), out) for line in lines), sep="\n", file=out, flush=True)
