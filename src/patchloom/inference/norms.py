"""How much each residual branch changes what goes through it (CaiT Fig. 4, thesis Fig. 3.6)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from patchloom.layers.residual import Branch
from patchloom.models.network import Network, evaluation_mode


@torch.no_grad()  # not inference_mode: see `score`
def branch_norms(network: Network, images: Tensor) -> dict[str, float]:
    """By residual branch, ||added|| / ||read||: the L2 norm of what the branch adds to a token (LayerScale included)
    over that of the token it reads. The ratio is taken per token, then averaged over all tokens and images.

    `images` (B, C, height, width) are normalised. All tokens are computed: for logits alone the last block would update
    the class token only. The tokens of a class-attention or pooling layer are those that it updates. The network is
    measured in eval mode, and every module has its old mode afterwards.
    """
    found: dict[str, float] = {}
    hooks = [
        module.register_forward_hook(partial(_note, found, name))
        for name, module in network.named_modules()
        if isinstance(module, Branch)
    ]
    try:
        with evaluation_mode(network):
            network.features(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _note(found: dict[str, float], name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    # A branch gets the running sum and what it reads; in sequential blocks both are the same tensor.
    total, x = inputs[0], inputs[1]
    added, read = (output - total).float(), x[:, : output.shape[1]].float()  # class-attention updates the first tokens
    # The clamp keeps an all-zero token from dividing by zero.
    found[name] = float((added.norm(dim=-1) / read.norm(dim=-1).clamp(min=1e-12)).mean())
