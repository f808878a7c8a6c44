"""Learning rates against the published values."""

from __future__ import annotations

import math

import pytest

from patchloom.recipes.recipe import Recipe
from patchloom.training.schedule import learning_rate, warmup_warning

DEIT = Recipe(name="deit", lr=1e-3, epochs=300, warmup_epochs=5)


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [(0, 1e-6), (1, 1e-6), (2, 2.008e-4), (3, 4.006e-4), (4, 6.004e-4), (5, 8.002e-4), (6, 9.993e-4), (299, 1.0109e-5)],
)
def test_the_published_off_by_one(epoch: int, rate: float) -> None:
    """What the published script ran epoch e at, for DeiT."""
    published = DEIT.replace(schedule_published=True)
    for step in (epoch * 7, epoch * 7 + 6):
        assert learning_rate(published, step, 7) == pytest.approx(rate, rel=2e-4)


def test_by_epoch_without_the_off_by_one() -> None:
    by_epoch = DEIT.replace(schedule_by="epoch")
    assert learning_rate(by_epoch, 0, 10) == learning_rate(by_epoch, 9, 10) == 1e-6
    assert learning_rate(by_epoch, 10, 10) == pytest.approx(2.008e-4, rel=1e-3)
    assert learning_rate(by_epoch, 2990, 10) == pytest.approx(1e-5 + 0.5 * 9.9e-4 * (1 + math.cos(math.pi * 299 / 300)))


def test_by_step_it_rises_then_falls_to_the_minimum() -> None:
    rates = [learning_rate(DEIT, step, 10) for step in range(3000)]
    peak = rates.index(max(rates))
    assert peak == 50
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(1e-5, rel=1e-2)


def test_a_rate_below_its_floor_rises_to_it_as_published() -> None:
    """ResMLP's transfer to CIFAR: 5e-6 with the floor left at 1e-5."""
    rates = [learning_rate(DEIT.replace(lr=5e-6, warmup_epochs=0), step, 1) for step in range(300)]
    assert rates == sorted(rates)
    assert rates[0] == 5e-6
    assert rates[-1] == pytest.approx(1e-5, rel=1e-2)


def test_step_decay_and_constant() -> None:
    old = DEIT.replace(schedule="step", decay_epochs=(30, 60, 80), warmup_epochs=0, lr=0.1, epochs=90)
    assert [learning_rate(old, epoch, 1) for epoch in (0, 29, 30, 60, 80)] == pytest.approx(
        [0.1, 0.1, 0.01, 1e-3, 1e-4]
    )
    assert learning_rate(DEIT.replace(schedule="constant", warmup_epochs=0), 250, 1) == 1e-3


def test_a_warm_up_in_steps_does_not_depend_on_the_length_of_an_epoch() -> None:
    recipe = DEIT.replace(schedule="constant", warmup_steps=40, warmup_lr=0.0, steps=100)
    for per_epoch in (1, 7, 1000):
        assert [learning_rate(recipe, step, per_epoch) for step in (0, 10, 40, 99)] == [0.0, 2.5e-4, 1e-3, 1e-3]


def test_inverse_square_root() -> None:
    recipe = DEIT.replace(schedule="inverse_sqrt", warmup_steps=100, warmup_lr=0.0, steps=1000)
    assert learning_rate(recipe, 50, 10) == pytest.approx(5e-4)
    for step in (100, 400, 900):
        assert learning_rate(recipe, step, 10) == pytest.approx(1e-3 * (100 / step) ** 0.5)
    assert learning_rate(recipe.replace(warmup_steps=0), 0, 10) == 1e-3


def test_a_run_that_ends_within_its_warm_up_is_warned_of() -> None:
    recipe = DEIT.replace(warmup_steps=100)
    assert warmup_warning(recipe, 101) is None
    assert warmup_warning(DEIT, 1) is None  # in epochs: shortened like the run
    assert "the warm-up of 100 steps does not end within the run of 80 steps" in (warmup_warning(recipe, 80) or "")
    assert "the run of 1 step:" in (warmup_warning(recipe, 1) or "")
