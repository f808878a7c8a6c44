"""Intervals, as `checkpoint_every` and `eval_every` give them: a time, a number of steps, or epochs."""

from __future__ import annotations

import re

from patchloom.errors import PatchloomError


def parse_interval(name: str, text: str) -> tuple[str, float]:
    """("seconds" | "steps" | "epochs", how many) from "30s", "500" or "1 epoch", the value of the setting `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|seconds?|m|min|minutes?|h|hours?|steps?|epochs?)?\s*", str(text))
    if not match or float(match[1]) <= 0:
        raise PatchloomError(f"{name} is a time (30s, 10m), a number of steps (500) or epochs (1 epoch), not {text!r}.")
    number, unit = float(match[1]), match[2] or "steps"
    if unit[0] in "mh" or unit == "s" or unit.startswith("second"):
        return "seconds", number * {"s": 1, "m": 60, "h": 3600}[unit[0]]
    if number != int(number):
        raise PatchloomError(f"{name} is a whole number of steps or epochs, not {text!r}.")
    return ("epochs" if unit.startswith("epoch") else "steps"), number


def steps_of_interval(name: str, text: str, steps_per_epoch: int) -> int:
    """The number of steps of "500" or "1 epoch", the value of the setting `name`, which cannot be a time."""
    unit, number = parse_interval(name, text)
    if unit == "seconds":
        raise PatchloomError(f"{name} is a number of epochs (1 epoch) or steps (500), not {text!r}.")
    return int(number) * (steps_per_epoch if unit == "epochs" else 1)
