"""Analyses of models, against formulas and scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import patchloom
from patchloom import PatchloomError
from patchloom.console import Console
from patchloom.explaining.analyses import analyse, pca_energy
from patchloom.explaining.charts import draw_analysis
from patchloom.explaining.weights import near_zero, scales, sparsity


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of training that log the norms."""
    out = tmp_path_factory.mktemp("runs") / "resmlp"
    patchloom.train(
        "digits",
        model="resmlp_nano",
        recipe="resmlp@small",
        out=out,
        console=Console(quiet=True),
        epochs=2,
        log_norms=True,
        workers=0,
        resolution=16,
        model_options={"depth": 2, "dim": 24},
    )
    return out


def test_sparsity_counts_what_is_below_a_twentieth_of_the_largest() -> None:
    assert near_zero(torch.tensor([[1.0, -0.04], [0.06, 0.0]])) == 0.5
    network = patchloom.create_model("resmlp_nano", depth=2, img_size=16)
    with torch.no_grad():
        weight = network.blocks[1].mixing.branches[0].fn.weight
        weight.zero_()
        weight[0, :8] = 1
    assert sparsity(network)["blocks.1"]["A"] == pytest.approx(1 - 8 / 256)
    assert list(sparsity(network)["blocks.0"]) == ["A", "B", "C"]


def test_sparsity_of_the_three_matrices_is_separate() -> None:
    """B and C differ, so that a mean over the FFN would be seen; a cross-patch MLP has two matrices over patches."""
    network = patchloom.create_model("resmlp_nano", depth=1, img_size=16)
    ffn = network.blocks[0].ffn.branches[0].fn
    with torch.no_grad():
        ffn.fc1.weight[: ffn.fc1.weight.shape[0] // 2] = 0
        ffn.fc2.weight.zero_()
        ffn.fc2.weight[0, 0] = -1
    got = sparsity(network)["blocks.0"]
    for name, weight in {"A": network.blocks[0].mixing.branches[0].fn, "B": ffn.fc1, "C": ffn.fc2}.items():
        size = np.abs(weight.weight.detach().numpy())
        assert got[name] == pytest.approx(float((size < 0.05 * size.max()).mean()), abs=1e-6)
    assert got["C"] == pytest.approx(1 - 1 / ffn.fc2.weight.numel())
    mixer = patchloom.create_model("resmlp_nano", depth=1, img_size=16, mixing="mlp")
    assert list(sparsity(mixer)["blocks.0"]) == ["A1", "A2", "B", "C"]
    parallel = patchloom.create_model("vit_tiny_2x2", depth=1, img_size=32)
    assert list(sparsity(parallel)["blocks.0"]) == ["B", "C"]


def test_scales_are_those_of_the_layers() -> None:
    network = patchloom.create_model("cait_nano", depth=2, img_size=16, scale_value=0.03)
    found = scales(network)
    assert len(found) == 2 * (2 + 2)  # two blocks and two class-attention blocks, two branches each
    assert all(values["mean"] == pytest.approx(0.03) for values in found.values())
    gamma = network.blocks[1].ffn.branches[0].scale.gamma
    with torch.no_grad():
        gamma.copy_(torch.linspace(-0.5, 1e-5, len(gamma)))
    values = scales(network)["blocks.1.ffn.branches.0"]["values"]
    np.testing.assert_allclose(values, gamma.detach(), rtol=1e-5)
    assert len(str(values)) < 16 * len(values)
    assert scales(patchloom.create_model("deit_nano", depth=1)) == {}


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    """Of classes and of files."""
    embedded = {"pca_energy": [0.5, 1.0], "tsne": [[0.0, 1.0], [1.0, 0.0]], "labels": ["$x_{", "$y^"]}
    analysis = {"models": {"runs/$a_{": {"model": "m", "branch_norms": {"blocks.0": 1.0}, "embeddings": embedded}}}
    assert len(draw_analysis(analysis, tmp_path)) == 2


def test_pca_energy_is_scikit_learns() -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 6)) * [5, 3, 2, 1, 0.5, 0.1]
    want = PCA().fit(vectors).explained_variance_ratio_.cumsum()
    np.testing.assert_allclose(pca_energy(vectors), want, atol=1e-9)


def test_a_run_logs_its_norms_when_asked_and_the_analysis_reads_them(run: Path) -> None:
    found = analyse([run])["models"][str(run)]
    assert [row["epoch"] for row in found["norms_by_epoch"]] == [1, 2]
    first, last = (row["norms"] for row in found["norms_by_epoch"])
    assert list(first) == [f"blocks.{i}.{part}.branches.0" for i in range(2) for part in ("mixing", "ffn")]
    assert all(value > 0 for value in first.values())
    assert first != last


def test_the_command_writes_data_and_figures(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    made = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1)
    made.class_names = tuple("0123456789")
    patchloom.save(made, other)
    folder = tmp_path / "digits"
    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images[:40], digits.target[:40], strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(folder / str(label) / f"{i}.png")
    words = ["explain", run, other, "--model-only", "--data", folder, "--split", "all", "--out", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-m", "patchloom", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("branch_norms", "disagreement", "embeddings", "layerscale", "norms_by_epoch", "sparsity")
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.png")) == sorted(names)
    for path in (tmp_path / "out").glob("*.png"):
        with Image.open(path) as drawn:
            assert len(np.unique(np.asarray(drawn))) > 20
    found = json.loads((tmp_path / "out" / "analysis.json").read_text())
    about = found["models"][str(run)]
    assert len(about["embeddings"]["tsne"]) == about["embeddings"]["count"] == 40
    assert about["embeddings"]["pca_energy"][-1] == pytest.approx(1)
    assert found["disagreement"]["names"][0] == "ground truth"


def test_the_number_of_embedded_images_is_an_option(run: Path) -> None:
    for count, got in ((12, 12), (9, 9)):
        about = analyse([run], "digits", count=count)["models"][str(run)]["embeddings"]
        assert about["count"] == len(about["tsne"]) == len(about["labels"]) == len(about["pca_energy"]) == got
    with pytest.raises(PatchloomError, match="at least 8, not 7"):
        analyse([run], "digits", count=7)
    with pytest.raises(PatchloomError, match="--count requires --data"):
        analyse([run], count=12)


def test_agreement_needs_images(run: Path) -> None:
    with pytest.raises(PatchloomError, match="--data"):
        analyse([run, run])
