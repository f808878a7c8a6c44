"""Projectors: weights that keep angles at first, and the role of their parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.models.embedding import EmbeddingConfig, EmbeddingNetwork, make_projector, start_linear
from patchloom.models.registry import find_config
from patchloom.models.roles import parameter_roles


def cosines(x: Tensor) -> Tensor:
    z = F.normalize(x, dim=1)
    return z @ z.T


def images_of_classes() -> Tensor:
    """Vectors (200, 24) around ten centres, far from the origin and of unequal spread, as trunks give them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 24, generator=generator).repeat_interleave(20, dim=0)
    return 3 + centres + 0.5 * torch.randn(200, 24, generator=generator)


@pytest.mark.parametrize(("hidden", "outputs"), [(48, 24), (64, 32), (51, 40)])
def test_a_linear_start_of_an_mlp_passes_standardised_vectors_on(hidden: int, outputs: int) -> None:
    x = images_of_classes()
    projector = make_projector("mlp", 24, hidden, outputs)
    start_linear(projector)
    standard = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    expected = F.pad(standard, (0, outputs - 24))
    torch.testing.assert_close(projector.train()(x), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("hidden", "outputs"), [(24, 24), (48, 12), (16, 12)])
def test_a_linear_start_of_a_narrow_mlp_is_linear_too(hidden: int, outputs: int) -> None:
    torch.manual_seed(0)
    x = images_of_classes()
    projector = make_projector("mlp", 24, hidden, outputs).eval()
    start_linear(projector)
    torch.testing.assert_close(projector(x[:1] + x[1:2]), projector(x[:1]) + projector(x[1:2]), atol=1e-4, rtol=0)
    away = (cosines(projector.train()(x)) - cosines(x - x.mean(0))).abs().mean()
    other = make_projector("mlp", 24, hidden, outputs).train()
    assert away < 0.7 * (cosines(other(x)) - cosines(x - x.mean(0))).abs().mean()


def test_a_linear_start_of_a_linear_projector_keeps_angles() -> None:
    x = images_of_classes()
    wide, narrow = (make_projector("fc", 24, 0, outputs) for outputs in (32, 8))
    for projector in (wide, narrow):
        start_linear(projector)
    torch.testing.assert_close(cosines(wide(x)), cosines(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(narrow.weight @ narrow.weight.T, torch.eye(8), atol=1e-5, rtol=0)
    start_linear(make_projector("none", 24, 0, 8))


def test_all_parameters_of_projector_predictor_and_classifier_are_heads() -> None:
    config = EmbeddingConfig(
        trunk=find_config("resmlp_nano").replace(depth=1), trunk_dim=96, hidden=8, dim=4, classifier=True
    )
    modules = nn.ModuleDict({"model": EmbeddingNetwork(config), "predictor": make_projector("mlp", 4, 8, 4)})
    roles = parameter_roles(modules)
    heads = {name for name, role in roles.items() if role == "head"}
    assert heads == {name for name in roles if not name.startswith("model.trunk.")}
