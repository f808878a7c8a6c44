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
def test_a_linear_start_of_an_mlp_keeps_the_angles_of_centred_vectors(hidden: int, outputs: int) -> None:
    torch.manual_seed(0)
    x = images_of_classes()
    projector = make_projector("mlp", 24, hidden, outputs)
    start_linear(projector)
    first, norm = projector[0], projector[1]
    assert isinstance(first, nn.Linear)
    z = projector.train()(x)
    # BatchNorm gives every unit its own scale, so the rotation is undone on what it gives.
    rotated = F.linear(x, first.weight[: hidden // 2])
    standard = (rotated - rotated.mean(0)) / (rotated.var(0, unbiased=False) + norm.eps).sqrt()
    torch.testing.assert_close(cosines(z), cosines(standard @ first.weight[: hidden // 2]), atol=1e-5, rtol=0)
    assert (cosines(z) - cosines(x - x.mean(0))).abs().mean() < 0.1
    # and the output depends linearly on the input
    half = projector((x + x[:1]) / 2)
    torch.testing.assert_close(cosines(half - half.mean(0)), cosines(z - z.mean(0)), atol=1e-4, rtol=0)


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
