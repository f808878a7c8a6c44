"""Intervals of checkpoints and evaluations: times, steps and epochs."""

from __future__ import annotations

import pytest

from patchloom.errors import PatchloomError
from patchloom.recipes.intervals import parse_interval
from patchloom.recipes.registry import find_recipe


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("500", ("steps", 500)), ("1 step", ("steps", 1)), ("2 epochs", ("epochs", 2)), ("30s", ("seconds", 30)),
        ("1.5 m", ("seconds", 90)), ("2 hours", ("seconds", 7200)),
    ],
)  # fmt: skip
def test_intervals(text: str, want: tuple[str, float]) -> None:
    assert parse_interval("checkpoint_every", text) == want


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "2.5 epochs", "soon", "3 days", ""])
def test_an_interval_that_is_none_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(PatchloomError, match=rf"checkpoint_every is .* not '{text}'"):
        parse_interval("checkpoint_every", text)


@pytest.mark.parametrize("name", ["checkpoint_every", "eval_every"])
def test_a_recipe_has_no_other_interval(name: str) -> None:
    with pytest.raises(PatchloomError, match=f"{name} is .* not 'soon'"):
        find_recipe("deit").replace(**{name: "soon"})
