"""The list of published weights is timm's."""

from __future__ import annotations

import patchloom
from patchloom.weights.catalogue import PUBLISHED
from patchloom.weights.hub import published_tags


def test_the_list_is_that_of_timm() -> None:
    theirs = {
        name: tuple(sorted({tag.split(".")[1] for tag in published_tags(name)})) for name in patchloom.list_models()
    }
    assert {name: tags for name, tags in theirs.items() if tags} == PUBLISHED
