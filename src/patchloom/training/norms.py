"""How much each residual branch changes what goes through it (thesis Fig. 3.6)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from patchloom.layers.residual import Branch


@torch.inference_mode()
def branch_norms(network: nn.Module, images: Tensor) -> dict[str, float]:
    """By residual branch, the norm of what it adds over the norm of what it reads, averaged over tokens and images;
    `images` are a batch, normalised."""
    found: dict[str, float] = {}
    hooks = [
        module.register_forward_hook(partial(_note, found, name))
        for name, module in network.named_modules()
        if isinstance(module, Branch)
    ]
    was_training = network.training
    network.eval()
    try:
        network(images)
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def _note(found: dict[str, float], name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    total, x = inputs[0], inputs[1]
    added, read = (output - total).float(), x[:, : output.shape[1]].float()  # of class-attention, the asking tokens
    found[name] = float((added.norm(dim=-1) / read.norm(dim=-1).clamp(min=1e-12)).mean())
