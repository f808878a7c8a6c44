"""The modules of a Grafit run: the network that is learned, the predictor, and the target network that follows."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from patchloom.data.randomness import seed_of
from patchloom.models.embedding import (
    EmbeddingConfig,
    EmbeddingNetwork,
    ProjectorKind,
    embedding_dim,
    make_projector,
    start_linear,
)
from patchloom.models.network import Network
from patchloom.models.registry import build
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.start import fill_from
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.terms import Terms
from patchloom.tasks.spec import Context
from patchloom.weights.report import LoadReport

MODEL, PROJECTOR, PREDICTOR, TARGET = "model", "projector", "predictor", "target"


def make_modules(
    config: RetrievalConfig, recipe: Recipe, terms: Terms, classes: int, context: Context
) -> tuple[nn.ModuleDict, LoadReport | None]:
    """The modules by name, with random weights drawn from the seed, and unless a checkpoint brings them, those that the
    run starts from.

    model       trunk, the projector if it stays, a classifier for cross-entropy
    projector   one that is dropped after training, as that of the instance branch beside cross-entropy
    predictor   q of Eq. 2.1
    target      the trunk and projector of f_xi and P_xi
    """
    report = None
    # The weights depend on the seed alone, and the caller's generator stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, "start"))
        trunk = build(config.trunk_config(recipe))
        if config.start is not None:
            if not context.from_checkpoint:
                report = fill_from(trunk, config.start, context.opened)
                report.reinitialised.clear()  # its head, which is taken away
            size = trunk.config.img_size
            trunk.preprocessing = dataclasses.replace(config.start.preprocessing, img_size=size)
        network = _embedding_network(trunk, recipe, terms, classes)
        if network.head is not None and config.start is not None:
            # Trained vectors are long: a random classifier would be confident, and its gradient would destroy them.
            for parameter in network.head.parameters():
                nn.init.zeros_(parameter)
        modules = nn.ModuleDict({MODEL: network})
        width, dim = network.config.trunk_dim, network.config.dim
        if terms.projects and not terms.projector_stays and recipe.projector != "none":
            dim = recipe.projector_dim
            modules[PROJECTOR] = make_projector(recipe.projector, width, recipe.projector_hidden, dim)
        if "inst" in terms:
            modules[PREDICTOR] = make_projector("mlp", dim, recipe.predictor_hidden, dim)
        if recipe.projector_start == "linear" or (recipe.projector_start == "auto" and config.start is not None):
            for part in (network.projector, *(module for name, module in modules.items() if name != MODEL)):
                start_linear(part)
        if "inst" in terms:
            modules[TARGET] = _target(modules, recipe.target_norm == "batch")
    return modules, report


def _embedding_network(trunk: Network, recipe: Recipe, terms: Terms, classes: int) -> EmbeddingNetwork:
    projector: ProjectorKind = recipe.projector if terms.projector_stays else "none"
    config = EmbeddingConfig(
        name=f"embedding of {trunk.config.name}",
        num_classes=max(1, classes),
        trunk=trunk.config,
        trunk_dim=embedding_dim(trunk),
        projector=projector,
        hidden=recipe.projector_hidden,
        dim=recipe.projector_dim,
        classifier="ce" in terms,
    )
    return EmbeddingNetwork(config, trunk)


def _target(modules: nn.ModuleDict, batch_statistics: bool) -> nn.Module:
    """A copy of trunk and projector that is in evaluation mode, so that nothing is dropped at random; its BatchNorm
    uses the statistics of the batch or running ones."""
    target: Any = copy.deepcopy(modules[MODEL])
    target.head = None
    if PROJECTOR in modules:
        target.projector = copy.deepcopy(modules[PROJECTOR])
    target.requires_grad_(False).eval()
    # In training mode BatchNorm normalises by its batch, as that of the trained network does.
    for module in target.modules():
        if batch_statistics and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return target


def projecting(modules: nn.ModuleDict) -> Any:
    """The network with the projector that losses see, also where it is dropped after training; the weights are
    shared."""
    if PROJECTOR not in modules:
        return modules[MODEL]
    network: Any = copy.copy(modules[MODEL])
    network._modules = dict(network._modules)  # a shallow copy would share it, and put the projector into the network
    network.projector = modules[PROJECTOR]
    return network


@torch.no_grad()
def follow(modules: nn.ModuleDict, decay: float, statistics: bool) -> None:
    """target <- decay target + (1 - decay) network; with `statistics` those of BatchNorm are copied."""
    target: Any = modules[TARGET]
    network: Any = modules[MODEL]
    projector = modules[PROJECTOR] if PROJECTOR in modules else network.projector  # noqa: SIM401 - it has no get
    for slow, fast in ((target.trunk, network.trunk), (target.projector, projector)):
        theirs = list(fast.parameters())
        if theirs:
            torch._foreach_lerp_(list(slow.parameters()), theirs, 1 - decay)
        if statistics:
            for mine, other in zip(slow.buffers(), fast.buffers(), strict=True):
                mine.copy_(other)
