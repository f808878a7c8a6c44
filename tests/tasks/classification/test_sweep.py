"""Sweeps of the test crop and of the resolution: each row is a separate evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import patchloom
from patchloom import PatchloomError
from patchloom.cli.main import main
from patchloom.exporting import export
from patchloom.tasks.classification.sweep import sweep


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.manual_seed(0)
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    network.class_names = tuple(map(str, range(10)))
    path = tmp_path_factory.mktemp("sweep") / "m.safetensors"
    patchloom.save(network, path)
    return str(path)


@pytest.mark.parametrize(("setting", "values"), [("crop_ratio", (0.6, 1.0, 0.875)), ("resolution", (16, 8, 24))])
def test_rows_are_separate_evaluations_in_the_given_order(setting: str, values: tuple, model: str) -> None:
    rows = sweep(model, "digits", setting, values)
    assert [row[setting] for row in rows] == list(values)
    for row in rows:
        one = patchloom.evaluate(model, "digits", **{setting: row[setting]})
        assert {name: row[name] for name in ("count", "top1", "top5", "loss", "ece")} == pytest.approx(
            {name: one[name] for name in ("count", "top1", "top5", "loss", "ece")}
        )
    assert len({row["loss"] for row in rows}) == 3


def test_an_onnx_file_is_swept_as_its_network_is(model: str, tmp_path: Path) -> None:
    export(model, "onnx", tmp_path / "m.onnx")
    ours, theirs = (sweep(of, "digits", "crop_ratio", (0.7, 1.0)) for of in (model, str(tmp_path / "m.onnx")))
    for one, other in zip(ours, theirs, strict=True):  # crop, normalisation and class names are in the file
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert patchloom.evaluate(str(tmp_path / "m.onnx"), "digits")["top1"] == patchloom.evaluate(model, "digits")["top1"]
    with pytest.raises(PatchloomError, match="16 x 16 pixels only, not 24 x 24"):
        patchloom.evaluate(str(tmp_path / "m.onnx"), "digits", resolution=24)
    with pytest.raises(PatchloomError, match="only `distill` and `evaluate` without --probe"):
        patchloom.predict(str(tmp_path / "m.onnx"), "x.png")


@pytest.mark.parametrize(
    "words", [["--crop-ratio", "0.7", "1", "FROM", "digits"], ["FROM", "--crop-ratio", "0.7", "1", "digits"]]
)
def test_values_may_stand_before_the_model_and_the_data(words: list[str], model: str, capsys) -> None:
    main(["evaluate", *(model if word == "FROM" else word for word in words), "--json"])
    assert [row["crop_ratio"] for row in json.loads(capsys.readouterr().out)["sweep"]] == [0.7, 1.0]


def test_one_setting_is_swept_and_the_other_kept(model: str) -> None:
    rows = sweep(model, "digits", "crop_ratio", (0.7, 1.0), resolution=24, split="train", batch=500)
    one = patchloom.evaluate(model, "digits", crop_ratio=0.7, resolution=24, split="train", batch=500)
    assert (rows[0]["count"], rows[0]["loss"]) == (1438, pytest.approx(one["loss"]))


def test_the_command_prints_a_table_json_and_a_chart(model: str, tmp_path: Path, capsys) -> None:
    words = ["evaluate", model, "digits", "--resolution", "8", "16", "32"]
    main([*words, "--json"])
    rows = json.loads(capsys.readouterr().out)["sweep"]
    assert [row["resolution"] for row in rows] == [8, 16, 32]
    main([*words, "--figure", str(tmp_path / "chart.png")])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in table] == ["resolution", "8", "16", "32"]
    assert [line[1] for line in table[1:]] == [f"{row['top1']:.2%}" for row in rows]
    with Image.open(tmp_path / "chart.png") as chart:
        assert chart.width > 800
        assert chart.convert("L").getextrema() == (0, 255)
    main(["evaluate", model, "digits", "--crop-ratio", "0.9", "--json"])
    assert "sweep" not in json.loads(capsys.readouterr().out)  # one value: a plain evaluation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--crop-ratio", "0.8", "1", "--resolution", "16", "32"], "cannot both be swept"),
        (["--crop-ratio", "0.8", "1", "--probe", "knn"], "--probe cannot be swept"),
        (["--resolution", "16", "32", "--disagreement", "a", "--data", "digits"], "--disagreement cannot be swept"),
        (["--crop-ratio", "0.8", "1.5"], "not 1.5"),
        (["--resolution", "16", "17"], "17"),
        (["--crop-ratio", "0.8", "1", "--figure", "chart.txt"], "not 'chart.txt'"),
        (["--crop-ratio", "0.8", "1", "--figure", "nowhere/chart.png"], "no folder nowhere"),
        (["--crop-ratio", "0.8", "--figure", "chart.png"], "--figure cannot be used with one evaluation"),
        (["--crop-ratio", "0.8", "weights"], "'weights' is not a number"),
    ],
)
def test_what_cannot_be_swept_is_refused(words: list[str], message: str, model: str, capsys, monkeypatch) -> None:
    def evaluated(*_: object, **__: object) -> None:
        raise AssertionError("evaluated before the values were checked")

    monkeypatch.setattr("patchloom.tasks.classification.evaluate.score", evaluated)
    given = ["evaluate", *([] if "--disagreement" in words else [model, "digits"]), *words]
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_setting_or_no_value_is_refused(model: str) -> None:
    with pytest.raises(PatchloomError, match="crop_ratio or resolution"):
        sweep(model, "digits", "interpolation", (1.0,))
    with pytest.raises(PatchloomError, match="at least one value"):
        sweep(model, "digits", "crop_ratio", ())
