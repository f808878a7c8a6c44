"""An accuracy comes with its 95 % interval."""

from __future__ import annotations

from patchloom.inference.intervals import wilson_interval
from patchloom.tasks.classification.metrics import interval_text


def test_people_read_the_interval_and_the_number_of_images() -> None:
    figures = {"top1": 56 / 60, "top1_interval": wilson_interval(56, 60), "count": 60}
    assert interval_text(figures) == "93.33% (95 % interval 84.1% to 97.4%) of 60 images"
