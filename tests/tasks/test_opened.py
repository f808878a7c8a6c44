"""Data is listed and weights are loaded once per run, whichever command starts it, and a run that opens for itself ends
with the same bytes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.data import opening, sources
from patchloom.models.embedding import EmbeddingConfig, trunk_of
from patchloom.models.registry import build
from patchloom.runs.launch import launch
from patchloom.tasks.classification.plans import plan_finetuning
from patchloom.tasks.classification.start import fill_from, load_start
from patchloom.tasks.opened import Opened
from patchloom.tasks.translation import text
from patchloom.weights import load as loading

QUICK = ["epochs=1", "batch_size=8", "workers=0", "--device", "cpu"]
NANOS = ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve training images in two classes, and four to evaluate on."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def save_weights(folder: Path, model: str = "deit_nano", **options: Any) -> Path:
    torch.manual_seed(1)
    network = patchloom.create_model(model, num_classes=2, **{"img_size": 16, "depth": 2, **options})
    network.class_names = ("cat", "dog")
    path = folder / f"{model.replace(':', '_')}.safetensors"
    patchloom.save(network, path)
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save_weights(tmp_path)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often data is listed, weights are loaded, images are decoded by split, and text files are read."""
    done: Counter[str] = Counter()

    def counted(module: Any, name: str, called: Callable[..., str]) -> None:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            done[called(*args)] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("open_folder", "open_manifest", "open_digits"):
        counted(opening, name, lambda *_: "lists")
    counted(loading, "_fetch", lambda *_: "loads")
    counted(sources, "read_encoded", lambda path: f"decoded of {path.parts[-3]}")
    counted(text, "read_lines", lambda path: path.name)
    return done


def test_finetune_lists_its_data_and_loads_its_weights_once(
    photos: Path, weights: Path, work: Counter[str], tmp_path: Path
) -> None:
    main(["finetune", str(weights), str(photos), *QUICK, "--out", str(tmp_path / "run")])
    assert (work["lists"], work["loads"]) == (1, 1)
    work.clear()
    main(["finetune", str(weights), str(photos), *QUICK, "--resolution", "24", "--out", str(tmp_path / "larger")])
    assert (work["lists"], work["loads"]) == (1, 1)
    work.clear()
    main(["finetune", str(weights), str(photos), *QUICK, "--plan"])
    assert (work["lists"], work["loads"]) == (1, 1)


def test_train_that_chooses_its_model_lists_its_data_once(photos: Path, work: Counter[str], tmp_path: Path) -> None:
    main(["train", str(photos), *QUICK, "--out", str(tmp_path / "run")])
    assert (work["lists"], work["loads"]) == (1, 0)
    work.clear()
    main(["train", str(photos), *QUICK, "--plan"])
    assert work["lists"] == 1


def test_each_run_of_a_sequence_lists_its_data_once(
    photos: Path, work: Counter[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(photos), *QUICK, "--finish", "24", "finish.epochs=1", "finish.batch_size=8"]
    main([*words, "--out", str(tmp_path / "run")])
    assert (work["lists"], work["loads"]) == (2, 1)
    assert "Chosen: model deit_nano" in capsys.readouterr().out
    work.clear()
    main([*words, "--plan"])
    assert work["lists"] == 2


def test_grafit_lists_its_data_and_loads_its_weights_once(
    photos: Path, weights: Path, work: Counter[str], tmp_path: Path
) -> None:
    small = ["views=2", "projector_hidden=16", "projector_dim=8", "predictor_hidden=16", *QUICK]
    for words in (["--out", str(tmp_path / "run")], ["--plan"], ["--labels", "none", "--plan"]):
        work.clear()
        main(["grafit", str(photos), "--model", str(weights), *small, *words])
        assert (work["lists"], work["loads"]) == (1, 1)


def test_translate_reads_its_text_once(work: Counter[str], tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    lines = [f"{a} {b} {c}" for a in ("ba", "bo") for b in ("di", "du", "ga") for c in ("go", "gu", "ha", "he")]
    for split in ("train", "val"):
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    main(["translate", str(tmp_path), "--pair", "en-de", "--model", "resmlp_mt_nano", "vocabulary=24", "--plan"])
    assert work == {"train.en": 1, "train.de": 1, "val.en": 1, "val.de": 1}


def test_evaluate_reads_only_the_images_that_it_evaluates(
    photos: Path, weights: Path, work: Counter[str], tmp_path: Path
) -> None:
    (photos / "train" / "cat" / "damaged.png").write_bytes(b"no image")
    scores = patchloom.evaluate(weights, photos, strict=True)  # damaged images of other splits do not matter
    assert scores["count"] == 4
    assert (work["lists"], work["loads"]) == (1, 1)
    assert work["decoded of val"] > 0
    assert work["decoded of train"] == 0
    work.clear()
    assert patchloom.evaluate(weights, photos, split="train")["count"] == 12
    assert (work["decoded of val"], work["lists"]) == (0, 1)


@pytest.mark.parametrize("words", [["--probe", "knn", "--k", "3"], ["--crop-ratio", "0.9", "1.0"]])
def test_other_evaluations_list_and_load_once(
    words: list[str], photos: Path, weights: Path, work: Counter[str]
) -> None:
    main(["evaluate", str(weights), str(photos), *words])
    assert (work["lists"], work["loads"]) == (1, 1)


def test_disagreement_loads_each_model_once(photos: Path, tmp_path: Path, work: Counter[str]) -> None:
    path = save_weights(tmp_path, distilled=True)
    work.clear()
    main(["evaluate", "--disagreement", str(path), "--data", str(photos)])
    assert (work["lists"], work["loads"]) == (1, 1)


def test_a_run_that_opens_for_itself_ends_with_the_same_bytes(photos: Path, weights: Path, tmp_path: Path) -> None:
    def planned() -> Any:
        changes = {"epochs": 1, "batch_size": 8, "workers": 0, "resolution": 24}
        return plan_finetuning(weights, photos, None, changes, {})

    quiet: dict[str, Any] = {"console": Console(quiet=True), "device": "cpu"}
    config = planned()
    runs = [
        launch(config, tmp_path / "handed over", **quiet),
        launch(config, tmp_path / "again", **quiet),  # the plan has nothing left to hand over
        launch(dataclasses.replace(planned(), opened=Opened()), tmp_path / "alone", **quiet),
    ]
    exports = {(run.folder / "export" / "model.safetensors").read_bytes() for run in runs}
    assert len(exports) == 1


def test_what_a_plan_loaded_is_freed_before_the_first_step(photos: Path, weights: Path, tmp_path: Path) -> None:
    config = plan_finetuning(weights, photos, None, {"epochs": 1, "batch_size": 8, "workers": 0}, {})
    network = weakref.ref(config.opened.keep(load_start, str(weights), {}))
    assert network() is not None
    alive: list[bool] = []

    class Noted(patchloom.Callback):
        def after_step(self, step: int, losses: Any) -> None:
            gc.collect()
            alive.append(network() is not None)

    launch(config, tmp_path / "run", console=Console(quiet=True), device="cpu", callbacks=[Noted()])
    assert alive == [False]


@pytest.mark.parametrize("model", [*NANOS, "timm:test_vit", "embedding"])
def test_weights_that_a_plan_loaded_are_resized_as_load_resizes_them(model: str, photos: Path, tmp_path: Path) -> None:
    size = 24
    if model == "timm:test_vit":
        pytest.importorskip("timm")
        path, size = save_weights(tmp_path, model, img_size=160, depth=None), 96
    elif model == "embedding":
        trunk = patchloom.create_model("deit_nano", img_size=16, depth=2, num_classes=1)
        config = EmbeddingConfig(name="embedding", num_classes=1, trunk=trunk.config, trunk_dim=trunk.config.dim)
        path = tmp_path / "embedding.safetensors"
        patchloom.save(build(config), path)
    else:
        path = save_weights(tmp_path, model)
    plan = plan_finetuning(path, photos, "new_classes", {"resolution": size}, {})
    network = build(plan.task.network_config(plan.recipe, 2))
    report = fill_from(network, plan.task.start, plan.opened)
    want: Any = patchloom.load(path, img_size=size)
    loaded, want = want.load_report, trunk_of(want)
    assert network.config.img_size == (size, size)
    assert report.resized == loaded.resized
    state = network.state_dict()
    for name, tensor in want.state_dict().items():
        assert torch.equal(state[name], tensor) or name in report.reinitialised, name
