"""What the weights alone say: how many are near zero, how strong each residual branch is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from patchloom.layers.ffn import FFN
from patchloom.layers.mixing import CrossPatchFFN, CrossPatchLinear
from patchloom.layers.residual import Branch
from patchloom.layers.scales import LayerScale, ScalarScale
from patchloom.models.network import Network

NEAR_ZERO = 0.05  # of the largest absolute weight (ResMLP Fig. 4.3)


def sparsity(network: Network) -> dict[str, dict[str, float]]:
    """By block, the share of weights whose absolute value is below 5 % of the largest of their matrix: of the layer
    over patches ("mixing") and of the two layers of the FFN ("ffn"), as thesis Fig. 4.3."""
    found: dict[str, dict[str, float]] = {}
    for i, block in enumerate(network.blocks):
        kinds = {"mixing": (CrossPatchLinear, CrossPatchFFN), "ffn": (FFN,)}
        for kind, types in kinds.items():
            shares = [
                near_zero(layer.weight)
                for module in block.modules()
                if isinstance(module, types)
                for layer in module.modules()
                if isinstance(layer, nn.Linear)
            ]
            if shares:
                found.setdefault(f"blocks.{i}", {})[kind] = sum(shares) / len(shares)
    return found


def near_zero(weight: Tensor) -> float:
    """The share of entries below 5 % of the largest absolute one."""
    size = weight.detach().abs()
    return float((size < NEAR_ZERO * size.max()).float().mean())


def scales(network: Network) -> dict[str, dict[str, Any]]:
    """By residual branch, the mean, least and largest absolute value of its LayerScale or scalar factor, and the values
    themselves to six digits."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, Branch) and isinstance(module.scale, LayerScale | ScalarScale):
            values = module.scale.gamma if isinstance(module.scale, LayerScale) else module.scale.alpha
            size = values.detach().abs()
            found[name] = {
                "mean": float(size.mean()),
                "min": float(size.min()),
                "max": float(size.max()),
                "values": [float(f"{value:.6g}") for value in values.detach().flatten().tolist()],
            }
    return found
