"""No character of a name is obeyed by a terminal."""

from __future__ import annotations

import io

import pytest

from patchloom.console import Console
from patchloom.terminal import print_lines, printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name.png", "plain name.png"),
        ("Käfer 甲虫 👩‍🔬.png", "Käfer 甲虫 👩‍🔬.png"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("two\nlines\r\t", "two\\nlines\\r\\t"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("gnp.\u202etpx", "gnp.\\u202etpx"),
        ("line\u2028break", "line\\u2028break"),
        ("not UTF-8 \udcff", "not UTF-8 \\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_lines_stay_lines_whatever_names_are_in_them() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_lines("one\n\x1b[2J", "zwölf", file=out)
    Console(out).say("three\nfour", "five")
    out.seek(0)
    assert out.read() == "one\\n\\x1b[2J\nzw\\xf6lf\nthree\\nfour\nfive\n"
