"""Files of others are read only where that ends soon: regular files, below a limit, JSON of a sane depth."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from patchloom import PatchloomError
from patchloom.reading import parse_json, read_file, read_json


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "good").write_bytes(b"12345")
    (tmp_path / "to good").symlink_to(tmp_path / "good")
    assert read_file(tmp_path / "to good", 5) == b"12345"
    for name, reason in (("pipe", "FIFO"), ("link", "FIFO"), ("zero", "device"), ("", "folder")):
        with pytest.raises(OSError, match=f"{reason}, not a regular file"):
            read_file(tmp_path / name, 5)
    with pytest.raises(OSError, match="NUL"):
        read_file("a\0b", 5)


def test_the_size_is_checked_before_reading(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # a sparse file: reading it would take a terabyte of memory
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_file(tmp_path / "huge", 1 << 20)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a\0": 1}', b"\0", b"\xff\xfe\xff", b""])
def test_json_that_cannot_be_parsed_is_one_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(PatchloomError, match=r"a\.json cannot be read as JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the text is wrong in
        parse_json(text)


def test_a_json_file_that_is_none_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    for path in (tmp_path / "a.json", tmp_path / "missing.json", tmp_path / "nul\0.json"):
        with pytest.raises(PatchloomError, match="json' cannot be read: "):
            read_json(path)


def test_memory_is_that_of_the_file_and_not_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_bytes(b"a" * 100)
    tracemalloc.start()
    try:
        assert read_file(tmp_path / "small.txt", 1 << 30) == b"a" * 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
