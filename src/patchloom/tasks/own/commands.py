"""Runs with parts of the user's own have no commands of their own: they are started from Python. Those with a
network of ours are evaluated and applied like any classifier."""

from __future__ import annotations

from patchloom.tasks.classification.evaluate_command import EVALUATE, PREDICT
from patchloom.tasks.commands import Command

__all__ = ["COMMANDS", "EVALUATE", "PREDICT"]

COMMANDS: tuple[Command, ...] = ()
