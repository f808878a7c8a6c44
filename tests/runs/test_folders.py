"""Folders for runs that name none."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchloom.errors import PatchloomError
from patchloom.runs.folders import free_folder


def test_a_name_that_is_taken_is_never_taken_again(tmp_path: Path) -> None:
    with free_folder("x/My photos!.csv", tmp_path) as first, free_folder("x/My photos!.csv", tmp_path) as second:
        (first / "recipe.yaml").touch()
        assert (first.name, second.name) == ("My-photos", "My-photos-2")
    assert [path.name for path in tmp_path.iterdir()] == ["My-photos"]
    (tmp_path / "file").touch()
    with pytest.raises(PatchloomError, match="--out"), free_folder("digits", tmp_path / "file"):
        pass
