"""`patchloom data check` counts what is there and names, with the reason, every file that cannot be read."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from patchloom.cli.main import main
from patchloom.data.check import check_data, difference_hash, near_duplicates
from patchloom.data.opening import open_source
from patchloom.data.splits import split_source

DIGITS = np.round(load_digits().images * (255 / 16)).astype(np.uint8)


def write(path: Path, number: int = 0, side: int = 8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(DIGITS[number]).resize((side, side), Image.Resampling.BICUBIC).save(path)
    return path


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["data", "check", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def messy(root: Path) -> Path:
    for number in range(6):
        write(root / "ant" / f"{number}.png", number, side=8 + number)
    for number in range(6, 9):
        write(root / "bee" / f"{number}.png", number)
    Image.new("CMYK", (30, 10)).save(root / "bee" / "cmyk.jpg")
    (root / "empty").mkdir()
    write(root / ".git" / "x.png")
    (root / "ant" / "zero.jpg").touch()
    good = write(root / "bee" / "cut 虫.png", 9, 64).read_bytes()
    (root / "bee" / "cut 虫.png").write_bytes(good[: len(good) // 2])
    return root


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, str(messy(tmp_path)))
    assert found["count"] == 10
    assert found["classes"] == {"ant": 6, "bee": 4}
    assert found["splits"] == {"all": 10}
    assert found["sizes"]["width"] == {"min": 8, "median": 9.5, "max": 30}
    assert found["sizes"]["height"] == {"min": 8, "median": 9.5, "max": 13}
    assert found["modes"] == {"CMYK": 1, "L": 9}
    assert found["imbalance"] == 1.5
    assert {entry["path"] for entry in found["unreadable"]} == {"ant/zero.jpg", "bee/cut 虫.png"}
    reasons = {entry["path"]: entry["reason"] for entry in found["unreadable"]}
    assert reasons["ant/zero.jpg"] == "the file is empty"
    assert "truncated" in reasons["bee/cut 虫.png"]
    assert any("not taken as a class: empty" in note for note in found["notes"])
    assert found["duplicates"] == found["duplicates_within"] == []


def test_the_summary_names_every_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "check", str(messy(tmp_path))])
    text = capsys.readouterr().out
    assert "10 images in 2 classes" in text
    assert "2 files cannot be read:\n  ant/zero.jpg: the file is empty\n  bee/cut 虫.png: " in text
    assert ".git" not in text


def test_a_sound_set_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "check", "digits"])
    text = capsys.readouterr().out
    assert "digits: 1797 images in 10 classes" in text
    assert "train 1438, val 359" in text
    assert "Every image can be read." in text


def test_equal_images_are_found_on_both_sides_of_a_split(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "train" / "ant" / f"{number}.png", number)
    write(tmp_path / "train" / "ant" / "again.png", 2)
    write(tmp_path / "val" / "ant" / "copy.bmp", 1)  # the same pixels in other bytes
    write(tmp_path / "val" / "ant" / "new.png", 20)
    found = check_data(open_source(tmp_path))
    assert found["duplicates"] == [["train/ant/1.png", "val/ant/copy.bmp"]]
    assert found["duplicates_within"] == [["train/ant/2.png", "train/ant/again.png"]]


def test_data_without_a_split_is_checked_as_training_would_split_it(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "ant" / f"{number}.png", 0)
    found = check_data(open_source(tmp_path))
    assert found["duplicates"]
    assert len(found["duplicates"]) + len(found["duplicates_within"]) >= 19


def test_every_held_out_image_is_paired_once_with_a_training_image(tmp_path: Path) -> None:
    for folder in "abcdefghijklmnopqrstuvwx":  # in some of them the first image by name is held out
        for number in range(12):
            write(tmp_path / folder / "ant" / f"{folder}{number}.png", 0)
        source = open_source(tmp_path / folder)
        split = split_source(source)
        pairs = check_data(source)["duplicates"]
        assert sorted(other for _, other in pairs) == sorted(item.key for item in split.held_out)
        assert {one for one, _ in pairs} <= {item.key for item in split.train}


def test_images_that_look_almost_the_same_are_found(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "ant" / f"{number}.png", number, side=64)
    with Image.open(tmp_path / "ant" / "3.png") as image:
        image.save(tmp_path / "ant" / "small.jpg", quality=95)
    found = check_data(open_source(tmp_path))
    assert found["near_duplicates"] == [["ant/3.png", "ant/small.jpg"]]
    assert found["duplicates"] == []


def test_near_hashes_are_all_found() -> None:
    """As a comparison of all with all finds them."""
    draw = np.random.default_rng(0)
    values = [int(value) for value in draw.integers(0, 2**63, 60)]
    values += [value ^ (1 << int(draw.integers(64))) ^ (1 << int(draw.integers(64))) for value in values[:40]]
    values += [value ^ 0b111 for value in values[:5]]
    values = sorted(set(values))
    expected = {frozenset((str(a), str(b))) for a in values for b in values if a != b and (a ^ b).bit_count() <= 2}
    pairs = near_duplicates((str(value), value, str(value).encode()) for value in values)
    assert {frozenset(pair) for pair in pairs} == expected
    assert len(pairs) == len(expected) >= 30


def test_near_hashes_are_all_found_where_many_share_a_part() -> None:
    values = [*range(2**62, 2**62 + 2**14, 7)]
    expected = sum((one ^ other).bit_count() <= 2 for one, other in combinations(values, 2))
    pairs = near_duplicates((str(value), value, b"") for value in values)
    assert len(pairs) == len({frozenset(pair) for pair in pairs}) == expected
    assert all((int(one) ^ int(other)).bit_count() <= 2 for one, other in pairs)


def test_the_hash_does_not_change_with_size() -> None:
    image = Image.fromarray(np.tile(np.arange(0, 180, 2, dtype=np.uint8)[::-1], (80, 1)))
    assert difference_hash(image) == difference_hash(image.resize((45, 40))) == 2**64 - 1


def test_a_label_column_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.png", number)
    text = "path,genus,species\n0.png,Apis,mellifera\n1.png,Apis,cerana\n2.png,Bombus,terrestris\n"
    (tmp_path / "bees.csv").write_text(text)
    where = str(tmp_path / "bees.csv")
    assert report(capsys, where, "--labels", "species")["classes"] == {"cerana": 1, "mellifera": 1, "terrestris": 1}
    with pytest.raises(SystemExit) as caught:
        main(["data", "check", where, "--labels", "family"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "'family'" in message
    assert "genus, species" in message


def test_a_set_of_bad_files_only_is_still_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "zero.jpg").touch()
    found = report(capsys, str(tmp_path))
    assert (found["count"], found["imbalance"], len(found["unreadable"])) == (0, None, 1)
    main(["data", "check", str(tmp_path)])
    assert "1 file cannot be read" in capsys.readouterr().out


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "Käfer" / "1.png")
    (tmp_path / "Käfer" / "虫.png").touch()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    main(["data", "check", str(tmp_path)])
    terminal.seek(0)
    assert "K\\xe4fer/\\u866b.png: the file is empty" in terminal.read()
