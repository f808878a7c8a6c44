"""A head for a network that has none, such as a trunk that was pre-trained without labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from patchloom.console import Console
from patchloom.data.sources import Item, Source
from patchloom.inference.embeddings import embeddings
from patchloom.inference.probes import linear_head
from patchloom.models.network import Network


@torch.no_grad()
def fit_head(network: Network, source: Source, items: Sequence[Item], workers: int, console: Console) -> None:
    """Give a network in evaluation mode the head that a linear probe of its embeddings finds on labelled images."""
    x = embeddings(network, source, items, network.preprocessing, workers=workers)
    y = np.asarray([item.label for item in items])
    weight, bias = linear_head(x, y, len(source.class_names))
    right = ((torch.from_numpy(x) @ weight.T + bias).argmax(dim=1).numpy() == y).mean()
    network.reset_head(len(source.class_names))
    for head in heads_of(network):
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    network.class_names = source.class_names
    network.eval()
    console.say(
        f"{network.config.name} has no head: a linear classifier of its features was fitted to {len(y)} training "
        f"images, of which it gets {right:.1%} right."
    )


def heads_of(network: Network) -> list:
    """The linear layers that give the logits of a network whose head was just made."""
    own = getattr(network, "output_heads", None)
    return own if own is not None else [network.network.get_classifier()]  # type: ignore[union-attr, operator]
