"""Bad input of `pretrain`: one sentence each, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretraining_runs
import pytest

from patchloom.errors import PatchloomError

flat, make_folder, pretrain = pretraining_runs.flat, pretraining_runs.make_folder, pretraining_runs.pretrain

Pretrain = Callable[..., Path]
Make = Callable[..., Path]


def refused(pretrain: Pretrain, data: Path, match: str, **changes: Any) -> None:
    with pytest.raises(PatchloomError, match=match):
        pretrain(data, "refused", **changes)
    written = data.parent / "refused"
    assert not any(path.is_file() for path in written.rglob("*"))


def test_a_folder_without_images(pretrain: Pretrain, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none here")
    refused(pretrain, tmp_path / "empty", "empty.* image")


def test_a_single_image(pretrain: Pretrain, make_folder: Make, tmp_path: Path) -> None:
    refused(pretrain, make_folder(tmp_path / "one", 1), "1 image")


def test_images_smaller_than_the_crop(pretrain: Pretrain, make_folder: Make, tmp_path: Path) -> None:
    refused(pretrain, make_folder(tmp_path / "tiny", 8, side=12), "12 pixels.*32 x 32")


def test_a_few_small_images_among_larger_ones_are_taken(pretrain: Pretrain, make_folder: Make, flat: Path) -> None:
    make_folder(flat / "small", 4, side=20)
    assert (pretrain(flat, epochs=1) / "export" / "model.json").exists()


def test_a_misspelt_method(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "'dinno'.*dino", method="dinno")


def test_a_misspelt_setting(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "local_crop.*local_crops", local_crop=2)


def test_a_setting_of_another_method(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "mask_ratio is a setting of beit and mae", mask_ratio=0.5)


@pytest.mark.parametrize("share", [0, 1])
def test_a_mask_of_nothing_or_everything(share: float, pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "mask_ratio", mask_ratio=share)


def test_a_recipe_of_another_task(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "deit@small is a recipe for classification", recipe="deit@small")


def test_a_network_of_text(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "network of text", model="transformer_mt_nano", model_options={})


def test_local_crops_that_patches_do_not_tile(pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, "local_size=20 is not divisible", local_size=20)


@pytest.mark.parametrize(
    ("name", "value"),
    [("student_temperature", 0), ("prototypes", 1), ("local_scale", (0.5, 0.2)), ("teacher_momentum", 1.5)],
)
def test_values_that_make_no_sense(name: str, value: Any, pretrain: Pretrain, flat: Path) -> None:
    refused(pretrain, flat, name, **{name: value})


def test_a_folder_that_is_taken(pretrain: Pretrain, flat: Path) -> None:
    run = pretrain(flat, epochs=1)
    before = (run / "export" / "model.safetensors").read_bytes()
    with pytest.raises(PatchloomError, match="holds a run already"):
        pretrain(flat, epochs=1)
    assert (run / "export" / "model.safetensors").read_bytes() == before
