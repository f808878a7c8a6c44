"""The one error that users meet (what was wrong, with the value, and what to do about it), and the exit codes."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike

EXIT_CODES = {
    0: "success",
    1: "any other error: a loss that is not finite, a full disk, an internal error",
    2: "wrong use or bad input; the message says what to change",
    3: "stopped by a signal (Ctrl-C, SIGTERM), with everything saved",
}


_FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or one on which this user may store no more


class PatchloomError(ValueError):
    """Wrong use or bad input. The command line prints its text and exits with code 2.

    Several arguments are several lines. A line break within one comes from a name, and is spelled out when printed.
    """

    @property
    def exit_code(self) -> int:
        """2, or 1 if a full disk caused it: that is no wrong use."""
        cause = self.__cause__
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in _FULL):
            cause = cause.__cause__
        return 2 if cause is None else 1

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class StoppedError(PatchloomError):
    """Work that could not continue: a loss that is not finite, a full disk. Exit code 1."""

    exit_code = 1


class InterruptedWork(PatchloomError):
    """A signal ended the work, with everything saved. Exit code 3."""

    exit_code = 3


@contextmanager
def errors_in(part: str) -> Iterator[None]:
    """Raise an exception of the user's own code as a PatchloomError that names this part of it.

    The exception is its cause, so its traceback is shown in Python. Too little memory stays an error of its own: it is
    not a fault of the code.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PatchloomError) or is_out_of_memory(error):
            raise
        raise PatchloomError(f"{part} raised {type(error).__name__}: {error}") from error


@contextmanager
def errors_in_writing(place: object, kind: type[PatchloomError] = PatchloomError) -> Iterator[None]:
    """Raise an OSError as a PatchloomError (or another `kind`): `place` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place} cannot be written: {error.strerror or error}.") from error


def check_place(name: str, value: object) -> None:
    """Refuse an argument that is neither a name nor a path, before anything is opened."""
    if not isinstance(value, str | PathLike):
        raise PatchloomError(f"{name} is a name or a path, not {type(value).__name__}.")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch raises a RuntimeError that says so, of a type of its own on a GPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a value of the option `name` that is not among the choices; the message lists them."""
    if value not in choices:
        raise PatchloomError(
            f"Unknown value {value!r} for {name}. Choose from: {', '.join(choices)}.{did_you_mean(str(value), choices)}"
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known words nearest to `word`, or nothing if none is near."""
    # 0.6 finds a letter or two that are wrong, and little else.
    near = get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
