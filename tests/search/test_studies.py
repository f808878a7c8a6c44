"""The granularity matrix and the preliminary study, on embeddings whose structure is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import searching
from searching import World, save_network

from patchloom.cli.main import main
from patchloom.search.analyses import halve, separability
from patchloom.search.evaluation import evaluate_search
from patchloom.search.granularity import matrix

world, built = searching.world, searching.built


def test_halves_are_even_and_stay_inside_their_class() -> None:
    coarse = np.array([0] * 7 + [1] * 4 + [2] * 5)
    for seed in range(10):
        halves = halve(coarse, seed)
        assert (halves // 2 == coarse).all()
        assert np.bincount(halves).tolist() == [4, 3, 2, 2, 3, 2]
    assert len({tuple(halve(coarse, seed)) for seed in range(10)}) == 10


def test_separability_is_high_where_images_are_apart_and_a_coin_inside_a_class_where_they_are_not() -> None:
    generator, coarse = np.random.default_rng(0), np.repeat(np.arange(4), 30)
    apart = generator.normal(size=(120, 200)) + 9 * np.eye(4, 200)[coarse]
    assert separability(apart, coarse, splits=3)["accuracy"] > 0.99
    collapsed = np.eye(4, 8)[coarse] + 1e-3 * generator.normal(size=(120, 8))
    found = separability(collapsed, coarse, splits=3)
    assert 0.45 < found["accuracy"] < 0.8
    assert found["conditioned"] is None
    # a wrong coarse prediction decides the fine one
    wrong = np.roll(np.eye(4)[coarse], 1, axis=1)
    assert separability(apart, coarse, wrong, splits=2)["conditioned"] < 0.05
    assert separability(apart, coarse, np.eye(4)[coarse], splits=2)["conditioned"] > 0.99
    # the network may know classes that none of these images has
    assert separability(apart, coarse, np.eye(6)[coarse], splits=2)["conditioned"] > 0.99


def test_the_matrix_has_what_evaluate_gives(world: World, tmp_path: Path, capsys) -> None:
    other = save_network(tmp_path / "other.safetensors", seed=1)
    out = tmp_path / "matrix"
    words = ["--data", str(world.table), "--labels", "coarse", "fine", "--out", str(out)]
    main(["search", "matrix", str(world.weights), str(other), *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "matrix.json").read_text())
    want = [evaluate_search(weights, world.table, ["coarse", "fine"])["levels"] for weights in (world.weights, other)]
    assert [one["levels"] for one in found["runs"]] == want
    columns, rows, values = matrix(found, "map")
    assert (columns, rows) == (["model.safetensors: none", "other.safetensors: none"], ["coarse", "fine"])
    assert values == [[one[level]["map"] for one in want] for level in rows]
    assert (out / "matrix.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_study_is_written_with_its_figures(world: World, tmp_path: Path, capsys) -> None:
    out = tmp_path / "study"
    words = ["--data", str(world.table), "--fine", "fine", "--coarse", "coarse", "--shown", "40", "--out", str(out)]
    main(["search", "analyse", str(world.weights), *words])
    assert "separability" in capsys.readouterr().out
    (one,) = json.loads((out / "analyses.json").read_text())["runs"].values()
    assert one["separability"]["conditioned"] is not None  # the network classifies the coarse column
    assert len(one["tsne"]["points"]) == len(one["tsne"]["fine"]) == 40
    energy = one["pca_energy"]
    assert energy == sorted(energy)
    assert energy[-1] == pytest.approx(1)
    assert 0 <= one["linear"] <= 1
    assert all((out / name).stat().st_size > 1000 for name in ("pca.png", "tsne.png"))
