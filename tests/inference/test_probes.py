"""Probes against scikit-learn's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import patchloom
from patchloom import PatchloomError
from patchloom.cli.main import main
from patchloom.data.opening import open_source
from patchloom.inference.embeddings import embeddings
from patchloom.inference.probes import _knn, linear_probabilities, probe


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Random weights for digits."""
    torch.manual_seed(1)
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1)
    network.class_names = tuple("0123456789")
    path = tmp_path_factory.mktemp("models") / "model.safetensors"
    patchloom.save(network, path)
    return path


def test_probes_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 4, 300)
    x = (generator.normal(size=(300, 8)) + np.eye(4, 8)[y] * 2).astype(np.float32)
    train, test = slice(0, 200), slice(200, 300)
    linear = [
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, C=strength)).fit(x[train], y[train])
        for strength in (0.01, 0.1, 1.0)
    ]
    got = linear_probabilities(x[train], y[train], x[test], 4)
    assert min(abs(one.predict_proba(x[test]) - got).max() for one in linear) < 1e-4
    neighbours = KNeighborsClassifier(10, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    want = neighbours.fit(x[train], y[train]).predict(x[test])
    assert (_knn(x[train], y[train], x[test], 4).argmax(1) == want).mean() > 0.99


@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_a_probe_beats_the_untrained_head(kind: str, model: Path) -> None:
    got = probe(model, "digits", kind)
    assert (got["count"], got["trained_on"]) == (359, 1438)
    assert got["top1"] > 0.4 > 2 * patchloom.evaluate(model, "digits")["top1"]


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (9, 0.5), (40, 0.02), (200, 100.0)])
def test_k_and_temperature_reach_the_votes_of_scikit_learns_neighbours(
    k: int, temperature: float, model: Path, capsys
) -> None:
    network, source = patchloom.load(model), open_source("digits")
    parts = [source.splits[name] for name in ("train", "val")]
    x, z = (embeddings(network, source, items, network.preprocessing) for items in parts)
    y, truth = (np.asarray([item.label for item in items]) for items in parts)
    # exp((cosine - 1) / temperature): the factor exp(-1 / temperature) is common to all votes
    oracle = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=lambda d: np.exp(-d / temperature))
    votes = oracle.fit(x.astype(np.float64), y).predict_proba(z.astype(np.float64))
    main(
        [
            "evaluate",
            str(model),
            "digits",
            "--probe",
            "knn",
            "--k",
            str(k),
            "--temperature",
            str(temperature),
            "--json",
        ]
    )
    got = json.loads(capsys.readouterr().out)
    assert (got["k"], got["temperature"], got["trained_on"]) == (k, temperature, len(y))
    assert got["top1"] == pytest.approx((votes.argmax(1) == truth).mean(), abs=2.1 / len(truth))  # near-ties
    if k > 100:  # with few neighbours, classes without a vote tie for the fifth place
        best = np.argsort(-votes, axis=1)[:, :5]
        assert got["top5"] == pytest.approx((best == truth[:, None]).any(axis=1).mean(), abs=2.1 / len(truth))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--probe", "knn", "--k", "0"], "--k must be at least 1"),
        (["--probe", "knn", "--k", "1439"], "more than the 1438 training images"),
        (["--probe", "knn", "--temperature", "0"], "--temperature must be positive"),
        (["--probe", "knn", "--temperature", "nan"], "--temperature must be positive"),
        (["--probe", "linear", "--k", "5"], "settings of --probe knn"),
        (["--probe", "linear", "--temperature", "0.1"], "settings of --probe knn"),
        (["--k", "5"], "settings of --probe knn"),
        (["--probe", "knn", "--head", "class"], "--head cannot be used with --probe"),
    ],
)
def test_settings_that_a_probe_cannot_take_are_refused(words: list[str], message: str, model: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(model), "digits", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_probe_is_refused(model: Path) -> None:
    with pytest.raises(PatchloomError, match="linear, knn"):
        probe(model, "digits", "deep")


@pytest.mark.parametrize(("classes", "images"), [("ab", 2), ("a", 8)])
def test_too_few_images_or_classes_for_a_linear_probe_are_refused(
    classes: str, images: int, model: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(images):
                Image.new("RGB", (16, 16), (i, i, ord(name))).save(tmp_path / split / name / f"{i}.png")
    with pytest.raises(PatchloomError, match="--probe knn works with few"):
        probe(model, tmp_path, "linear")
    assert probe(model, tmp_path, "knn", k=1)["count"] == len(classes) * images


@pytest.mark.parametrize("split", ["all", "train", "train+val", "test+train"])
def test_a_probe_is_never_tested_on_the_images_that_it_is_fitted_to(split: str, model: Path) -> None:
    with pytest.raises(PatchloomError, match="would test it on them"):
        probe(model, "digits", "knn", split=split)
