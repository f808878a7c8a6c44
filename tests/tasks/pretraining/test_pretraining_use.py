"""What a pre-training run is for: fine-tuning, probes, explanations, search, Grafit and distillation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretraining_runs
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.console import Console
from patchloom.errors import PatchloomError

labelled, pretrain = pretraining_runs.labelled, pretraining_runs.pretrain

QUIET: dict[str, Any] = {"device": "cpu", "console": Console(quiet=True)}
SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 8, "workers": 0, **QUIET}


@pytest.fixture
def run(labelled: Path, pretrain: Callable[..., Path]) -> Path:
    return pretrain(labelled, "pretrained", epochs=1, probe_every=0)


def test_finetune_begins_with_the_trunk_and_a_new_head(
    run: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patchloom.finetune(run, labelled, out=tmp_path / "tuned", tune="head", **{**SHORT, "console": Console()})
    said = capsys.readouterr().out
    assert "head.weight: no head in the file, 3 classes here" in said
    before, tuned = patchloom.load(run).state_dict(), patchloom.load(tmp_path / "tuned")
    after = tuned.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["head.weight"].shape == (3, 48)
    assert patchloom.evaluate(tmp_path / "tuned", labelled, device="cpu")["count"] == 9
    assert tuned.config.head == "linear"


def test_loading_with_classes_adds_a_head(run: Path) -> None:
    network = patchloom.load(run, num_classes=4)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert sorted(network.load_report.reinitialised) == ["head.bias", "head.weight"]


def test_a_trunk_has_no_classes_to_predict(run: Path, labelled: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="no classes to predict"):
        patchloom.predict(run, [next(labelled.rglob("*.png"))])
    patchloom.save(patchloom.load(run), alone := tmp_path / "alone.safetensors")  # far from its run
    with pytest.raises(PatchloomError, match="without a head"):
        patchloom.predict(alone, [next(labelled.rglob("*.png"))], device="cpu")
    with pytest.raises(PatchloomError, match="without a head"):
        patchloom.evaluate(alone, labelled, device="cpu")


def test_evaluate_takes_the_settings_of_both_probes(run: Path, labelled: Path) -> None:
    found = patchloom.evaluate(run, labelled, probe="knn", k=3, temperature=0.2, device="cpu")
    assert (found["k"], found["temperature"], found["trained_on"]) == (3, 0.2, 36)
    assert patchloom.evaluate(run, labelled, probe="linear", device="cpu")["probe"] == "linear"
    with pytest.raises(PatchloomError, match="settings of --probe knn"):
        patchloom.evaluate(run, labelled, probe="linear", k=3)


def test_its_embedding_is_explained(run: Path, labelled: Path) -> None:
    image = next(labelled.rglob("*.png"))
    found = patchloom.explain(run, Image.open(image), device="cpu", maps=["class-attention", "grad-cam", "occlusion"])
    assert found.target == "this image"
    assert found.maps.keys() == {"class-attention", "grad-cam", "occlusion"}
    assert found.predictions[0]["probability"] == pytest.approx(1 / (1 + torch.e**-2), abs=1e-4)
    assert found.faithfulness


@pytest.mark.parametrize("options", [{}, {"distilled": True}, {"aggregation": "average"}])
def test_an_explanation_goes_from_an_empty_image_to_the_whole(options: dict[str, Any]) -> None:
    from patchloom.explaining.likeness import likeness_network
    from patchloom.models.registry import build, find_config

    network: Any = build(find_config("deit_nano").replace(depth=2, **options).without_head()).eval()
    x = torch.randn(1, 3, 32, 32)
    compared = likeness_network(network, x)
    with torch.no_grad():
        logits = compared(torch.cat([x, torch.zeros_like(x)]))
    torch.testing.assert_close(logits, torch.tensor([[2.0, 0.0], [-2.0, 0.0]]), atol=1e-4, rtol=1e-4)
    assert network.config.headless, "the network itself stays as it is"


def test_its_embeddings_are_indexed(run: Path, labelled: Path, tmp_path: Path) -> None:
    from patchloom.search.index import Index

    index = Index.build(run, labelled, tmp_path / "index", device="cpu")
    assert len(index) == 45


def test_grafit_begins_with_the_trunk(run: Path, labelled: Path, tmp_path: Path) -> None:
    found = patchloom.grafit(
        labelled, model=run, out=tmp_path / "grafit", recipe="grafit@small", projector="none", loss="knn", lr=0.0,
        min_lr=0.0, warmup_epochs=0.0, **SHORT,
    )  # fmt: skip
    before, after = patchloom.load(run).state_dict(), patchloom.load(found.folder).state_dict()
    assert all(torch.equal(before[name], after[f"trunk.{name}"]) for name in before)


def test_a_trunk_teaches_through_a_linear_classifier_of_its_features(
    run: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = patchloom.distill(
        run, labelled, model="deit_nano", recipe="deit@small", out=tmp_path / "student", method="hard",
        model_options={"depth": 1, "dim": 48, "patch_size": 8}, **{**SHORT, "console": Console()},
    )  # fmt: skip
    assert "a linear classifier of its features was fitted to 36 training images" in capsys.readouterr().out
    assert json.loads((found.folder / "environment.json").read_text())["teachers"][0][0]
    assert (found.folder / "export" / "model.json").exists()


def test_the_fitted_head_gives_the_probe_s_predictions() -> None:
    import numpy as np

    from patchloom.inference.probes import linear_head, linear_probabilities

    draw = np.random.default_rng(0)
    for classes, present in ((3, [0, 1, 2]), (2, [0, 1]), (4, [0, 2, 3])):
        y = draw.choice(present, 80)
        x = draw.normal(3.0, 2.0, (80, 5)) + y[:, None]
        weight, bias = linear_head(x, y, classes)
        logits = torch.from_numpy(x).float() @ weight.T + bias
        wanted = linear_probabilities(x, y, x, classes)
        torch.testing.assert_close(logits.softmax(dim=1).double(), torch.from_numpy(wanted), atol=1e-4, rtol=1e-3)


def test_export_files_hold_the_trunk_alone(run: Path) -> None:
    tensors = load_file(run / "export" / "model.safetensors")
    trunk = patchloom.create_model("deit_nano", img_size=32, patch_size=8, depth=2, dim=48).state_dict()
    assert tensors.keys() == {name for name in trunk if not name.startswith("head.")}
