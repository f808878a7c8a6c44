"""The C++ kernels as torch operators, `torch.ops.patchloom.*`, for float32 on a CPU that has AVX2 or AVX-512.

Importing this module registers them. Weights are floats (`pack`) or int8 (`pack_int8`); what goes in and comes out is
float32 with both.

Shapes: B images, N tokens, D channels, H heads of d = D / H channels. Weights of a Linear come as panels (`pack`). An
operator whose name ends in `_` adds to its first argument in place.
"""

from patchloom.kernels import attention_ops, block_ops, linear_ops  # noqa: F401 (they register the operators)
from patchloom.kernels.calls import available as available
from patchloom.kernels.calls import takes_kernels as takes_kernels
from patchloom.kernels.calls import why_not as why_not
from patchloom.kernels.packing import LANES as LANES
from patchloom.kernels.packing import joined as joined
from patchloom.kernels.packing import pack as pack
from patchloom.kernels.packing import pack_int8 as pack_int8
from patchloom.kernels.packing import padded as padded
from patchloom.kernels.packing import panel as panel
from patchloom.kernels.packing import whole_mixing as whole_mixing
