"""Runs with parts of the user's own have no commands of their own: they are started from Python. Those that hold a
network of ours are evaluated and applied as any classifier."""

from __future__ import annotations

from patchloom.tasks.classification.evaluate_command import EVALUATE as CLASSIFIERS
from patchloom.tasks.classification.evaluate_command import PREDICT as CLASSES
from patchloom.tasks.commands import Command, Tool

COMMANDS: tuple[Command, ...] = ()
EVALUATE = Tool(lambda _: None, CLASSIFIERS.run)
PREDICT = Tool(lambda _: None, CLASSES.run)
