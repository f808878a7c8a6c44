"""`patchloom train DATA` and nothing else; advice on few images, equal images and few held-out images; odd names."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from patchloom.cli.main import main
from patchloom.errors import PatchloomError
from patchloom.tasks.classification.defaults import choose

QUICK = ["epochs=1", "workers=0", "model.depth=1", "img_size=16"]


def write_digits(root: Path, counts: dict[str, int], labels: dict[str, int], size: int = 16) -> Path:
    """Real digits; `counts` images of each class in each split ("": no split)."""
    digits = load_digits()
    for name, digit in labels.items():
        images = iter(digits.images[digits.target == digit])
        for split, count in counts.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = (next(images) * 15).astype("uint8")
                Image.fromarray(pixels).resize((size, size)).convert("RGB").save(folder / f"{i}.png")
    return root


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "pets", {"": 10}, {"cat": 3, "dog": 7})


def test_nothing_but_the_data_trains_into_a_new_folder_each_time(
    pets: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "pets", *QUICK])
    said = capsys.readouterr().out
    assert "model deit_nano and recipe deit@small" in said
    assert "20 images" in said
    assert "finetune" in said
    assert "deit@small@small" not in said
    before = (tmp_path / "runs" / "pets" / "recipe.yaml").read_bytes()
    (command,) = (line.strip() for line in said.splitlines() if "--model" in line)
    words = shlex.split(command)
    assert words[0] == "patchloom"
    main(words[1:])
    assert "Chosen" not in capsys.readouterr().out
    again = (tmp_path / "runs" / "pets-2" / "recipe.yaml").read_text()
    assert (tmp_path / "runs" / "pets" / "recipe.yaml").read_bytes() == before == again.encode()


def test_a_plan_writes_nothing(pets: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "pets", *QUICK, "--plan", "--recipe", "resmlp@small"])
    assert "resmlp_nano" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_refused_leaves_no_folder(pets: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (pets / "cat" / "bad.png").write_bytes(b"no image")
    with pytest.raises(SystemExit):
        main(["train", "pets", *QUICK, "--strict"])
    assert not list((tmp_path / "runs").iterdir())


def test_several_processes_need_a_folder_that_all_of_them_know(pets: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main(["train", str(pets), *QUICK])
    assert "--out" in capsys.readouterr().err


def test_the_choice_follows_size_and_number_of_the_images(tmp_path: Path) -> None:
    photos = write_digits(tmp_path / "photos", {"": 2}, {"cat": 3, "dog": 7}, size=200)
    few = choose(photos)
    assert (few.model, few.recipe, few.settings) == ("deit_tiny", "deit@small", ())
    assert choose(photos, model="cait_s24").recipe == "cait@small"
    assert choose(photos, recipe="deit3_1k").model == "deit3_small"
    assert choose(photos, model="deit_base", recipe="deit").reason == ""
    missing = "".join(f"photos/x{i}.png,dog\n" for i in range(20_000))  # only the first of them is there
    (tmp_path / "many.csv").write_text(f"path,label\nphotos/cat/0.png,cat\n{missing}")
    many = choose(tmp_path / "many.csv")
    assert (many.model, many.recipe, many.settings) == ("deit_small", "deit", ("accumulate=16",))
    with pytest.raises(PatchloomError, match="diet"):
        choose(photos, recipe="diet")
    for empty in ({"model": ""}, {"recipe": ""}):
        with pytest.raises(PatchloomError, match="''"):
            choose(photos, **empty)


def test_equal_images_on_both_sides_and_few_held_out_images_are_told(tmp_path: Path, capsys) -> None:
    data = write_digits(tmp_path / "data", {"train": 6, "val": 3}, {"cat": 3, "dog": 7})
    Image.open(data / "train" / "dog" / "2.png").save(data / "val" / "dog" / "other.bmp")  # equal pixels, other bytes
    main(["train", str(data), "--model", "deit_nano", "--recipe", "deit", *QUICK, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "1 pair of duplicate images on both sides of the split:\n  train/dog/2.png  val/dog/other.bmp" in said
    assert "7 images, fewer than 100" in said
    assert "--recipe deit@small" in said
    (last,) = ((tmp_path / "run") / "log.jsonl").read_text().splitlines()
    main(["evaluate", str(tmp_path / "run"), str(data), "--json"])
    out, err = capsys.readouterr()
    record, scores = json.loads(last), json.loads(out)
    assert record["top1_interval"] == scores["top1_interval"]
    assert record["count"] == scores["count"] == 7
    assert "fewer than 100" in err
    main(["train", str(data / "train"), "--model", "deit_nano", "--recipe", "deit", *QUICK, "--hold-out", "none",
          "--out", str(tmp_path / "all")])  # fmt: skip
    assert "fewer than 100" not in capsys.readouterr().out


def test_enough_images_need_no_advice(tmp_path: Path, capsys) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5_100, 4, 4, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        folder = tmp_path / "data" / ("val" if i < 100 else "train") / str(i % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.bmp")
    main(
        ["train", str(tmp_path / "data"), "--model", "deit_nano", "--recipe", "deit", *QUICK, "batch_size=64", "--plan"]
    )
    said = capsys.readouterr().out
    assert "5000 training images" in said
    assert "finetune" not in said
    assert "Warning" not in said


def test_names_with_control_characters_are_spelled_out_everywhere(tmp_path: Path, capsys) -> None:
    odd = "\x1b[31mni\x07ne\n\x1b]0;owned\x07"
    data = write_digits(tmp_path / "da\nta\x1b[2J", {"train": 6, "val": 3}, {"cat": 3, odd: 9})
    shutil.copy(data / "train" / odd / "0.png", data / "val" / odd / "copy.png")
    (data / "train" / odd / "bad.png").write_bytes(b"no image")
    run = str(tmp_path / "run")
    main(["train", str(data), "--model", "deit_nano", "--recipe", "deit@small", *QUICK, "--plan"])
    main(["train", str(data), "--model", "deit_nano", "--recipe", "deit@small", *QUICK, "--out", run])
    main(["evaluate", run, str(data)])
    main(["data", "check", str(data)])
    main(["runs", run])
    out, err = capsys.readouterr()
    main(["predict", run, str(data / "val" / odd / "0.png"), str(data / "val" / "cat" / "0.png")])
    predictions = capsys.readouterr().out
    for words in (["train", "no\x1b[2J\nfolder", *QUICK], ["runs", "no\x1b[2J\nfolder"], ["train", "x", "--\x1b[2J"]):
        with pytest.raises(SystemExit):
            main(words)
    refused = capsys.readouterr().err
    assert "\\x1b[31mni\\x07ne\\n\\x1b]0;owned" in out
    assert not {"\x1b", "\x07"} & set(out + err + predictions + refused)
    assert len(predictions.splitlines()) == 2
    assert "\nfolder" not in refused
    assert all("owned" not in line or "ni" in line for line in (out + err).splitlines())


@pytest.mark.parametrize("kind", ["nowhere", "empty", "notes.txt"])
def test_what_data_can_be_is_shown_on_lines_of_their_own(kind: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / kind), *QUICK])
    assert "\n  FOLDER/CLASS/image.jpg" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [("[]", "an empty list"), ("{}", "dict"), ("[1]", "not lists")])
def test_labels_of_real_that_are_none_are_named(content: str, said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "nowhere", "digits", "--real", str(tmp_path / "real.json")])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "real.json" in err
