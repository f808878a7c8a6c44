"""The command line: parse, call, print. `patchloom.errors.EXIT_CODES` lists the exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from patchloom import __version__, temporary
from patchloom.cli import bench, data, evaluate, explain, export, models, recipes, runs, search, serve, train
from patchloom.cli.output import is_main_process
from patchloom.errors import EXIT_CODES, InterruptedWork, PatchloomError, is_out_of_memory
from patchloom.terminal import print_lines, printable

_COMMANDS = (models, recipes, train, runs, evaluate, explain, search, export, serve, data, bench)
_OWNERS = {module.__name__.rpartition(".")[2]: module for module in _COMMANDS} | {"predict": evaluate}


def main(words: Sequence[str] | None = None) -> None:
    """Run a command: parse the words, call its function, and exit with its code.

    Args:
        words: the command line without the program's name; default: sys.argv.

    Raises:
        SystemExit: with one of `EXIT_CODES`; it returns if all went well.
    """
    words = list(sys.argv[1:] if words is None else words)
    parser = _parser(words[0] if words else None)
    # Settings (key=value) may stand anywhere; argparse would take them for positionals of the wrong kind.
    options, rest = parser.parse_known_args(words)
    options.words = words
    options.settings = [word for word in rest if _is_setting(word)] if hasattr(options, "settings") else []
    if unknown := [word for word in rest if word not in options.settings]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with _ended_by_signals():
            options.run(options)
        sys.stdout.flush()
    except PatchloomError as error:
        if options.debug:
            raise
        if is_main_process() or not isinstance(error, InterruptedWork):
            first, *more = map(str, error.args)
            print_lines(f"patchloom: {first}", *more, file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output went away, as in `patchloom models | head`
        # Python would complain about the broken pipe once more at exit.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a full disk behind our output, and the like
        print_lines(f"patchloom: {error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if options.debug or not is_out_of_memory(error):
            raise
        print("patchloom: There is not enough memory: choose a smaller batch, image or network.", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Outside the training loop, which saves first, a signal ends a command at once.

    An exception out of a signal handler would end up in whatever runs just then (an import, a library's callback) and
    may be lost there; what is on the disk is whole after any kill.
    """

    def stop(*_: object) -> None:
        with suppress(Exception):
            sys.stdout.flush()
        temporary.remove()
        with suppress(OSError):
            os.write(2, b"patchloom: stopped.\n" if is_main_process() else b"")
        # Nothing is cleaned up beyond this: exit handlers and destructors may take locks that are held right now.
        os._exit(3)

    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {which: signal.signal(which, stop) for which in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors spell out control characters in the user's words, which a terminal would obey."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _is_setting(word: str) -> bool:
    """key=value, which may stand anywhere among the options of a command that takes settings."""
    return "=" in word and not word.startswith("-")


def _parser(name: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command `name`; of all commands for --help, for names that are wrong, and by default."""
    parser = _Parser(
        prog="patchloom",
        description="Train, evaluate, explain, search and deploy patch-based vision models.",
        epilog="\n".join(["exit codes:", *(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"patchloom {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    for module in (_OWNERS[name],) if name in _OWNERS else _COMMANDS:
        module.add_parser(commands, shared)
    return parser
