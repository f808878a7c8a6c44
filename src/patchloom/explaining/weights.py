"""Analyses of weights alone: sparsity of the matrices, and scales of the residual branches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from patchloom.layers.ffn import FFN
from patchloom.layers.mixing import CrossPatchFFN, CrossPatchLinear
from patchloom.layers.residual import Branch
from patchloom.layers.scales import LayerScale, ScalarScale
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork

NEAR_ZERO = 0.05  # of the largest absolute weight (thesis Fig. 4.3)


def sparsity(network: PatchNetwork) -> dict[str, dict[str, float]]:
    """The share of weights below 5 % of the largest absolute weight of their matrix, by block (thesis Fig. 4.3).

    "A" is the cross-patch layer of ResMLP ("A1" and "A2" if it is an MLP), "B" and "C" are the two layers of the FFN
    (Eq. 4.2, 4.3). The values of parallel branches are averaged.
    """
    found: dict[str, dict[str, float]] = {}
    for i, block in enumerate(network.blocks):
        shares: dict[str, list[float]] = {}
        for module in block.modules():
            for name, weight in _matrices(module).items():
                shares.setdefault(name, []).append(near_zero(weight))
        if shares:
            found[f"blocks.{i}"] = {name: sum(values) / len(values) for name, values in shares.items()}
    return found


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """The matrices of a layer by their names in the thesis; none for other modules."""
    if isinstance(module, CrossPatchLinear):
        return {"A": module.weight}
    if isinstance(module, CrossPatchFFN):
        return {"A1": module.fc1.weight, "A2": module.fc2.weight}
    return {"B": module.fc1.weight, "C": module.fc2.weight} if isinstance(module, FFN) else {}


def near_zero(weight: Tensor) -> float:
    """The share of entries below 5 % of the largest absolute entry."""
    size = weight.detach().abs()
    return float((size < NEAR_ZERO * size.max()).float().mean())


def scales(network: Network) -> dict[str, dict[str, Any]]:
    """Mean, minimum and maximum of the absolute scale of each residual branch (LayerScale or a scalar), and the values
    with six digits.

    Branches without a learned scale are left out.
    """
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
