"""A copy of a network for inference: norms and scales folded into the weights beside them, residuals in place.

Exact to float rounding, unless it uses int8 matrix multiplication. Each residual branch becomes one that adds to the
tokens where they are; a branch of a kind that is not known here stays as it is. Shapes: x is (B, N, D) tokens or
(B, height, width, D) maps. May import kernels, layers and the rest of models.
"""

from patchloom.models.fused.fuse import fuse as fuse
from patchloom.models.fused.network import FusedNetwork as FusedNetwork
