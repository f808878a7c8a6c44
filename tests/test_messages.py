"""Words of messages, and values for JSON."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from patchloom.data.scan import report_skipped
from patchloom.errors import PatchloomError, StoppedError, check_choice, errors_in_writing
from patchloom.models.class_names import names_or_indices
from patchloom.temporary import write_json
from patchloom.text import count, some, without_nan


def test_numbers_agree_with_their_nouns():
    assert [count(n, "image") for n in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert count(2, "class", "classes") == "2 classes"
    assert [some(["a", "b"]), some(list("abc"), 2)] == ["a, b.", "a, b, ..."]


def test_one_skipped_file_is_singular():
    said: list[str] = []

    class Listener:
        def say(self, *lines: str) -> None:
            said.extend(lines)

    report_skipped({"a.png": "it is empty"}, Listener(), strict=False)  # type: ignore[arg-type]
    assert said == ["1 unreadable file skipped:", "  a.png: it is empty"]


def test_json_has_null_for_nan_at_any_depth():
    value = {"a": [np.float32("nan"), 1.5, (float("inf"), True)], "n": np.float64(2.0), "i": 3, "t": "x", "none": None}
    plain = without_nan(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "a": [None, 1.5, [None, True]], "n": 2.0, "i": 3, "t": "x", "none": None,
    }  # fmt: skip
    assert [type(plain["a"][2][1]), type(plain["n"])] == [bool, float]


def test_classes_without_names_are_numbered():
    assert names_or_indices(None, 3) == ("0", "1", "2")
    assert names_or_indices(("cat", "dog"), 2) == ("cat", "dog")


def test_an_unknown_choice_lists_the_choices_and_suggests_the_nearest():
    check_choice("--tune", "head", ("all", "head"))
    with pytest.raises(PatchloomError) as caught:
        check_choice("--tune", "attn", ("all", "attention"))
    assert (
        str(caught.value) == "Unknown value 'attn' for --tune. Choose from: all, attention. Did you mean 'attention'?"
    )


def test_a_write_that_fails_names_the_file_and_the_reason():
    message = r"^RUN/log cannot be written: No space left on device\.$"
    with pytest.raises(StoppedError, match=message) as caught, errors_in_writing("RUN/log", StoppedError):
        raise OSError(errno.ENOSPC, "No space left on device", "RUN/.log.temporary")
    assert caught.value.exit_code == 1


def test_json_is_written_whole_with_a_newline_at_its_end(tmp_path: Path):
    write_json(tmp_path / "a.json", {"a": [1, "b"]})
    assert (tmp_path / "a.json").read_text() == json.dumps({"a": [1, "b"]}, indent=1) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
