"""`patchloom recipes`: the list, one recipe with its sources, JSON for programs, mistakes in one sentence."""

from __future__ import annotations

import json

import pytest

from patchloom.cli.main import main
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.registry import find_recipe, list_recipes

KEYS = {
    "name", "optimizer", "lr", "batch_size", "epochs", "warmup_epochs", "weight_decay", "label_smoothing", "loss",
    "mixup", "cutmix", "augmentation", "crop", "erasing", "repeated_augmentation", "color_jitter", "drop_path", "ema",
    "clip_grad", "test_crop_ratio", "resolution", "sources",
}  # fmt: skip


def test_the_list_has_a_line_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    recommended, rows = lines[1:4], lines[6:]
    assert [line.split()[0] for line in rows] == list_recipes()
    assert lines[0] == "recommended"
    assert {line.split()[0] for line in recommended} <= set(list_recipes())
    assert lines[4] == ""
    (line,) = (line for line in rows if line.startswith("deit3_1k "))
    assert line.split()[1:6] == ["lamb", "0.003", "2048", "400", "bce"]


def test_a_value_that_is_none_is_not_set(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "resmlp_mt@small"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("steps "))
    assert line.split(maxsplit=3)[1:3] == ["not", "set"]


def test_one_recipe_is_a_table_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "deit"])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line]
    assert ["field", "value", "source"] in rows
    assert ["weight_decay", "0.05", "thesis Table 3.9"] in rows
    assert ["lr", "0.001", "thesis Table 3.9: 5e-4 x batch / 512"] in rows


def test_json_of_one_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "cait", "--model", "cait_s36", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert set(values) >= KEYS
    assert (values["name"], values["drop_path"], values["layerscale"]) == ("cait", 0.2, 1e-6)
    assert not any(isinstance(value, dict) for key, value in values.items() if key != "sources")


def test_json_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in values] == list_recipes()
    images = list_recipes(ClassificationOptions)
    assert all(set(row) >= KEYS for row in values if row["name"] in images)
    assert values[0]["lr"] == find_recipe("deit").lr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes", "diet"], "'deit'"),
        (["recipes", "resmpl@small"], "'resmlp@small'"),
        (["recipes", "cait", "--model", "cait_xss24"], "'cait_xxs24'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out
