"""Progress and messages: a moving line on a terminal, plain lines elsewhere, nothing from helper processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import TextIO

from patchloom.errors import PatchloomError
from patchloom.terminal import encodable, printable


@dataclass
class Console:
    """`say` prints lines; `progress` rewrites one, at most ten times a second, and only on a terminal."""

    out: TextIO | None = field(default_factory=lambda: sys.stdout)
    quiet: bool = False
    _moving: bool = False
    _last: float = 0.0

    def say(self, *lines: str) -> None:
        """Print lines; what `progress` has written is erased first."""
        # Carriage return and "erase to the end of the line": what moved is overwritten by the line that stays.
        self._write(("\r\033[K" if self._moving else "") + "".join(f"{printable(line)}\n" for line in lines))
        self._moving = False

    def progress(self, text: str) -> None:
        """Rewrite the moving line, at most ten times a second."""
        if self.quiet or self.out is None or not self.out.isatty() or monotonic() - self._last < 0.1:
            return
        self._last, self._moving = monotonic(), True
        self._write("\r\033[K" + printable(text))

    def _write(self, text: str) -> None:
        """Write to the output. If its reader has gone away, the console becomes quiet and the work continues.

        Characters that the output cannot encode, such as those in file names, are written as escapes.
        """
        if self.quiet or self.out is None:
            return
        try:
            self.out.write(encodable(text, self.out))
            self.out.flush()
        except (BrokenPipeError, ValueError):
            self.quiet = True


def duration(seconds: float) -> str:
    """ "45 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def choose_console(console: Console | None) -> Console:
    """The console that is given, by default one on standard output. Raises PatchloomError for anything else."""
    if console is None:
        return Console()
    if not isinstance(console, Console):
        raise PatchloomError(f"console is a patchloom.console.Console, not {type(console).__name__}.")
    return console
