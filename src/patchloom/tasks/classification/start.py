"""Where fine-tuning starts: trained weights, fitted to another size and to other classes, partly frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from patchloom.data.sources import Source
from patchloom.errors import PatchloomError
from patchloom.inference.models import check_images
from patchloom.models.embedding import trunk_of
from patchloom.models.foreign import ForeignNetwork
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.patchconvnet import per_class_queries
from patchloom.models.roles import parameter_roles, tuned_parameters
from patchloom.tasks.classification.classes import same_classes
from patchloom.tasks.classification.config import Start, absolute_place
from patchloom.tasks.opened import Opened
from patchloom.weights.hub import size_notes
from patchloom.weights.load import load
from patchloom.weights.matching import fit_sizes
from patchloom.weights.report import LoadReport


def open_start(
    weights: str | PathLike[str],
    source: Source,
    hints: Mapping[str, Any],
    delta: bool,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    opened: Opened | None = None,
) -> tuple[Network, Start, list[str]]:
    """The network as its file has it, where a run on `source` starts, and what the user should know of it. `opened`
    keeps the network for `fill_from`."""
    place = absolute_place(weights)
    loaded = (opened or Opened()).keep(load_start, place, dict(hints))
    check_images(loaded, weights)
    network, notes = trunk_of(loaded), []  # a run of Grafit: its projector is left out
    theirs, ours = network.class_names, source.class_names
    names = None if network.config.headless else same_classes(theirs, ours, network.config.num_classes)
    if names is not None and theirs is None:
        notes.append(
            f"{weights} has {len(ours)} classes without names: they are taken to be those of the data, in this order: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}."
        )
    if names is None and theirs is None and len(ours) == network.config.num_classes and not network.config.headless:
        notes.append(
            f"The classes of the data are numbers, but not the indices 0 to {len(ours) - 1} of {weights}: its head "
            "starts from scratch."
        )
    own = network.preprocessing
    preprocessing = dataclasses.replace(own, mean=mean or own.mean, std=std or own.std)
    start = Start(place, preprocessing, names, dict(hints), delta=delta)
    return network, start, notes


def load_start(weights: str, hints: Mapping[str, Any]) -> Network:
    """The network as its file has it; random numbers that `load` draws for it do not change those drawn afterwards."""
    with torch.random.fork_rng(devices=[]):
        return load(weights, **hints)


@torch.no_grad()
def fill_from(network: Network, start: Start, opened: Opened | None = None) -> LoadReport:
    """Give a fresh network the weights of `start`, resized to its image size; new heads stay as they are where the
    classes are others.

    Returns:
        Which tensors were loaded, left at their random start (with the reason), and unused.

    Raises:
        PatchloomError: the file lacks a tensor that is not part of a head.
    """
    loaded, size = (opened or Opened()).take(load_start, start.weights, start.hints), network.config.img_size
    base, report = trunk_of(loaded), loaded.load_report
    if isinstance(base, ForeignNetwork):
        base.set_image_size(size)
    report.notes += size_notes(start.weights, size)
    of_classes = {name for name, role in parameter_roles(network).items() if role == "head"}
    # PatchConvNet with one query per class: each query begins as a copy of the trained single one.
    if network.per_class and not base.per_class:  # every class starts from the one query
        if base.config.num_classes != network.config.num_classes:
            base.reset_head(network.config.num_classes)
        base = per_class_queries(base)
    elif network.per_class:
        of_classes |= {"class_token"}
    theirs = base.state_dict()
    if isinstance(network, PatchNetwork) and isinstance(base, PatchNetwork):
        fit_sizes(theirs, base.config, network, report)
    report.model, report.loaded = network.config.name, []
    for name, tensor in network.state_dict().items():
        if (
            name in theirs
            and theirs[name].shape == tensor.shape
            # Heads of the same shape but for other classes would start with meaningless weights.
            and not (start.class_names is None and _in(name, of_classes))
        ):
            tensor.copy_(theirs[name])
            report.loaded.append(name)
        elif _in(name, of_classes):
            report.reinitialised[name] = _why_from_scratch(base, network)
        else:
            raise PatchloomError(f"{start.weights} has no {name} of the shape that {network.config.name} needs.")
    report.unused += [name for name in theirs if name not in network.state_dict()]
    return report


def _why_from_scratch(base: Network, network: Network) -> str:
    if base.config.headless:
        return f"no head in the file, {network.config.num_classes} classes here"
    theirs, ours = (f"a {kind_of_head(one)} head" for one in (base, network))
    if theirs == ours:
        theirs, ours = (f"{one.config.num_classes} classes" for one in (base, network))
    if theirs != ours:
        return f"{theirs} in the file, {ours} here"
    return "the classes in the file have other names"


def kind_of_head(network: Network) -> str:
    """The option `head` of a network's config. Networks of timm have no such option, and a linear head."""
    head = getattr(network.config, "head", "linear")
    return "linear" if head == "none" else head  # what a network without a head gets


def _in(name: str, parameters: set[str]) -> bool:
    """Whether a tensor is among the parameters, or belongs to their module, as the statistics of a BatchNorm do."""
    module = name.rpartition(".")[0]
    return name in parameters or (module != "" and any(other.rpartition(".")[0] == module for other in parameters))


def freeze(network: Network, tune: str) -> None:
    """Leave only what `tune` names trainable: the rest has no gradient, no optimizer state, no statistics to update.
    What the network fixes itself (scale_trainable=False) stays fixed."""
    tuned = tuned_parameters(network, tune)
    for name, parameter in network.named_parameters():
        if name not in tuned:
            parameter.requires_grad_(False)
