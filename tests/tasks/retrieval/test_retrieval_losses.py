"""The instance and triplet losses against their formulas, one pair after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.inference.neighbours import SIGMA
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.retrieval.losses import instance_loss, plain_instance_loss, triplet_loss
from patchloom.tasks.retrieval.terms import terms_of


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("views", [2, 3, 5])
def test_instance_loss_is_equation_2_1(views: int) -> None:
    q, z = (torch.randn(views, 4, 7, dtype=torch.float64) for _ in range(2))
    found, plain = instance_loss(list(q), list(z)), plain_instance_loss(list(q), list(z))
    for image in range(4):
        pairs = itertools.permutations(range(views), 2)
        cosines = [cosine(q[i, image].numpy(), z[j, image].numpy()) for i, j in pairs]
        expected = -sum(cosines) / (views * (views - 1))
        assert float(found[image]) == pytest.approx(expected, abs=1e-12)
        assert float(plain[image]) == pytest.approx(expected, abs=1e-6)


def test_instance_loss_and_its_plain_form_have_one_gradient() -> None:
    values = torch.randn(3, 4, 7)
    targets = list(torch.randn(3, 4, 7))
    gradients = []
    for loss in (instance_loss, plain_instance_loss):
        q = values.clone().requires_grad_()
        loss(list(q), targets).sum().backward()
        gradients.append(q.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_equal_views_have_the_least_instance_loss() -> None:
    x = torch.randn(5, 7)
    torch.testing.assert_close(instance_loss([x, x, x], [x, x, x]), -torch.ones(5))


@pytest.mark.parametrize("mining", ["semihard", "hard", "all"])
def test_triplet_loss_is_its_definition(mining: str) -> None:
    a, p = torch.randn(9, 5), torch.randn(9, 5)
    u, v = (F.normalize(x, dim=1).double().numpy() for x in (a, p))
    found = triplet_loss(a, p, 0.2, mining)
    for i in range(9):
        near = ((u[i] - v[i]) ** 2).sum()
        others = [((u[i] - v[j]) ** 2).sum() for j in range(9) if j != i]
        further = [d for d in others if d > near]
        chosen = {"hard": [min(others)], "semihard": [min(further) if further else max(others)], "all": others}[mining]
        expected = np.mean([max(0.0, near - d + 0.2) for d in chosen])
        assert float(found[i]) == pytest.approx(expected, abs=1e-5)


def test_a_triplet_needs_another_image() -> None:
    assert not triplet_loss(torch.randn(1, 5), torch.randn(1, 5), 0.2, "hard").any()


def terms(loss: str, labelled: bool = True, **changes: object) -> tuple[tuple[str, ...], bool, int, bool]:
    found = terms_of(find_recipe("grafit").replace(loss=loss, views=4, **changes), labelled)
    return found.losses, found.projector_stays, found.views, found.extra


def test_losses_decide_views_and_what_is_exported() -> None:
    assert terms("knn+inst") == (("knn", "inst"), True, 4, False)
    assert terms("knn+inst", supervised_view="extra") == (("knn", "inst"), True, 5, True)
    assert terms("knn") == (("knn",), True, 1, False)
    assert terms("inst") == (("inst",), False, 4, False)  # thesis Table 2.7: no projector is counted
    assert terms("ce+inst", supervised_view="extra") == (("ce", "inst"), False, 5, True)
    assert terms("triplet") == (("triplet",), True, 2, False)
    assert terms("ce+triplet") == (("ce", "triplet"), False, 2, False)
    assert terms("knn+inst", labelled=False) == (("inst",), True, 4, False)
    assert terms("knn+inst", embedding="trunk")[1] is False


@pytest.mark.parametrize("loss", ["knn", "ce", "ce+inst"])
def test_losses_that_need_labels_are_refused_without(loss: str) -> None:
    with pytest.raises(PatchloomError, match="labels"):
        terms(loss, labelled=False)


def test_recipes_have_the_sigma_of_the_search() -> None:
    assert find_recipe("grafit").sigma == find_recipe("snca_plus@small").sigma == SIGMA


def test_every_open_value_of_the_recipe_has_a_source() -> None:
    recipe = find_recipe("grafit")
    named = ("memory_start", "memory_update", "memory_renormalise", "target_decay", "target_decay_end", "target_norm")
    for name in (*named, "predictor_hidden", "projector_hidden", "supervised_view", "singletons", "embedding"):
        assert recipe.sources[name]


def test_views_are_at_least_two_for_the_instance_loss() -> None:
    with pytest.raises(PatchloomError, match="views is at least 2, not 1"):
        find_recipe("grafit").replace(views=1)
    assert isinstance(find_recipe("snca").replace(views=1).views, int)
