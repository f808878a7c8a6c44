"""Runs with parts of the user's own have no commands: they are started from Python."""

from __future__ import annotations

import argparse
from typing import NoReturn

from patchloom.tasks.commands import Command, Tool


def _from_python_only(_: argparse.Namespace) -> NoReturn:
    from patchloom.errors import PatchloomError
    from patchloom.tasks.own.spec import MESSAGE

    raise PatchloomError(MESSAGE)


COMMANDS: tuple[Command, ...] = ()
EVALUATE = PREDICT = Tool(lambda _: None, _from_python_only)
