"""Neighbours, kNN probabilities and scores under a condition, against plain float64 formulas and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from patchloom import PatchloomError
from patchloom.inference import neighbours, ranking
from patchloom.inference.neighbours import Nearest, best, choose_k, knn_probabilities, log_odds, nearest, normalise
from patchloom.inference.ranking import Level, average_precision, rank


def vectors(count: int, dim: int = 8, seed: int = 0) -> torch.Tensor:
    return normalise(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def knn(cosines: np.ndarray, labels: np.ndarray, k: int, classes: int) -> np.ndarray:
    """Eq. 2.6 for one query, written plainly."""
    near = np.argsort(-cosines, kind="stable")[:k]
    weights = np.exp(cosines[near] / 0.05)
    return np.array([weights[labels[near] == name].sum() for name in range(classes)]) / weights.sum()


@pytest.mark.parametrize("k", [1, 7, 40])
@pytest.mark.parametrize("scores_at_a_time", [1, 90, 1 << 20])
def test_nearest_are_scikit_learns(k: int, scores_at_a_time: int, monkeypatch) -> None:
    monkeypatch.setattr(neighbours, "_SCORES", scores_at_a_time)
    queries, items = vectors(13, seed=1), vectors(40)
    found = nearest(queries, items, k)
    distances, places = NearestNeighbors(n_neighbors=k, metric="cosine").fit(items.numpy()).kneighbors(queries.numpy())
    assert (found.places.numpy() == places).all()
    np.testing.assert_allclose(1 - found.scores.numpy(), distances, atol=1e-6)


def test_equal_scores_come_in_the_order_of_the_items() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        scores = torch.from_numpy(generator.integers(0, 4, (3, 12)).astype(np.float32))
        for k in (0, 1, 5, 11, 12):
            want = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :k]
            assert (best(scores, k).places.numpy() == want).all()


def test_left_out_items_are_not_found() -> None:
    items = vectors(30)
    found = nearest(items, items, 29, leave_out=range(30))
    assert (found.places != torch.arange(30)[:, None]).all()
    assert all(len(set(row)) == 29 for row in found.places.tolist())


def test_more_neighbours_than_items_are_refused() -> None:
    with pytest.raises(PatchloomError, match="6 neighbours were requested of 5"):
        nearest(vectors(2), vectors(5), 6)


@pytest.mark.parametrize("k", [1, 10, 40])
def test_probabilities_are_eq_2_6(k: int) -> None:
    queries, items, labels = vectors(9, seed=1), vectors(40), np.arange(40) * 7 % 5
    got = knn_probabilities(queries, items, torch.from_numpy(labels), k).numpy()
    cosines = queries.double().numpy() @ items.double().numpy().T
    np.testing.assert_allclose(got, [knn(row, labels, k, 5) for row in cosines], atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-12)


def test_a_small_temperature_does_not_overflow() -> None:
    got = knn_probabilities(vectors(3, seed=1), vectors(20), torch.arange(20) % 3, 10, temperature=1e-4)
    assert torch.isfinite(got).all()


def test_k_is_chosen_by_leave_one_out() -> None:
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 4, 120)
    items = normalise(torch.from_numpy(generator.normal(size=(120, 6)) + 0.8 * np.eye(4, 6)[labels]))
    k, accuracy = choose_k(items, labels)
    cosines = items.double().numpy() @ items.double().numpy().T
    np.fill_diagonal(cosines, -2)
    want = {
        each: np.mean([knn(row, labels, each, 4).argmax() == label for row, label in zip(cosines, labels, strict=True)])
        for each in (10, 15, 20, 25, 30)
    }
    assert accuracy == pytest.approx(want)
    assert k == max(want, key=lambda each: (want[each], -each))


def test_a_tiny_index_uses_all_others_and_a_single_image_has_no_neighbour() -> None:
    assert choose_k(vectors(5), torch.tensor([0, 0, 1, 1, 1]))[0] == 4
    assert choose_k(vectors(1), torch.tensor([0])) == (1, {})


def test_the_condition_is_eq_2_5_and_finite() -> None:
    cosines, coarse = torch.tensor([[0.9, 0.5, -0.2, 0.4]]), [0, 1, 2, -1]
    probabilities = torch.tensor([[0.75, 0.25, 0.0]])
    got = neighbours.conditioned(cosines, log_odds(probabilities), coarse)[0].tolist()
    lowest = math.log(1e-4 / (1 - 1e-4))
    want = [0.9 + math.log(3), 0.5 - math.log(3), -0.2 + lowest, 0.4 + lowest]
    assert got == pytest.approx(want, abs=1e-6)
    assert torch.isfinite(log_odds(torch.tensor([[0.0, 1.0]]))).all()


def test_the_oracle_puts_the_class_first_and_keeps_the_order_inside() -> None:
    cosines = torch.tensor([[-0.9, 0.5, 0.8, 0.50000006]])
    got = neighbours.oracle(cosines, [1], [1, 0, 0, 1])
    assert got.argsort(dim=1, descending=True).tolist() == [[3, 0, 2, 1]]


def test_average_precision_is_scikit_learns_with_and_without_ties() -> None:
    generator = np.random.default_rng(1)
    for number in range(400):
        count = int(generator.integers(1, 60))
        scores = generator.normal(size=count)
        if number % 2:  # many ties
            scores = np.round(scores * generator.choice([1, 2, 8]))
        relevant = generator.random(count) < generator.choice([0.05, 0.5, 0.95])
        if not relevant.any():
            relevant[int(generator.integers(count))] = True
        want = average_precision_score(relevant, scores)
        assert average_precision(scores, scores[relevant]) == pytest.approx(want, abs=1e-12)
    assert average_precision(np.array([0.1, 0.2]), np.array([])) == 0


@pytest.mark.parametrize("scores_at_a_time", [1, 200, 1 << 20])
def test_rankings_are_scikit_learns_for_several_levels(scores_at_a_time: int, monkeypatch) -> None:
    monkeypatch.setattr(neighbours, "_SCORES", scores_at_a_time)
    generator = np.random.default_rng(2)
    # few distinct vectors of whole numbers: most scores are tied, and no product of matrices rounds them
    items, queries = (torch.from_numpy(generator.integers(-1, 2, (n, 3)).astype(np.float32)) for n in (60, 17))
    levels = {
        "fine": Level(generator.integers(0, 6, 17), generator.integers(-1, 6, 60)),
        "coarse": Level(generator.integers(0, 2, 17), generator.integers(0, 2, 60)),
    }
    got, near = rank(queries, items, levels, k=5)
    cosines = (queries @ items.T).numpy()
    for column, level in levels.items():
        want = [
            average_precision_score(level.items == label, row)
            for label, row in zip(level.queries, cosines, strict=True)
        ]
        np.testing.assert_allclose(got[column], want, atol=1e-12)
    assert (near.places == nearest(queries, items, 5).places).all()


def test_adjusted_scores_rank_and_cosines_choose_the_neighbours() -> None:
    queries, items = vectors(4, seed=1), vectors(20)
    level = {"label": Level(np.zeros(4, int), np.arange(20) % 2)}
    got, near = rank(queries, items, level, adjust=lambda part, scores: -scores, k=3)
    want = [average_precision_score(np.arange(20) % 2 == 0, -row) for row in (queries @ items.T).numpy()]
    np.testing.assert_allclose(got["label"], want, atol=1e-12)
    assert (near.places == nearest(queries, items, 3).places).all()


def test_no_queries_give_empty_results() -> None:
    got, near = rank(torch.empty(0, 8), vectors(5), {"label": Level(np.zeros(0, int), np.zeros(5, int))})
    assert len(got["label"]) == 0
    assert isinstance(near, Nearest)
    assert ranking.average_precision(np.ones(3), np.ones(1)) == pytest.approx(1 / 3)
