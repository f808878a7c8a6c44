"""Networks whose parameters are spread over processes (FSDP2), and whole tensors made of them.

torch's modules for sharding are imported on use: they take half as long as torch itself, and few runs are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.training.processes import Processes


def shard_module(module: nn.Module, processes: Processes) -> None:
    """Spread a module's parameters over the processes in place: each block of its lists of blocks, then the rest.

    Blocks come first because `fully_shard` of the whole takes the parameters that no inner call has taken.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for blocks in _outer_lists(module):
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)  # an evaluation leaves nothing gathered
    # FSDP gathers parameters in hooks around `forward`. Other entry points compute with the sharded parts, and fail,
    # unless they are registered. A module names further ones of its own in `entry_points`.
    for method in ("features", "embed", *getattr(module, "entry_points", ())):
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of modules that are in no other such list."""
    for child in module.children():
        # Not into a list's own modules: a block is gathered and freed as one unit, which is what saves memory.
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outer_lists(child)


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, without an import of its class."""
    return hasattr(tensor, "full_tensor")


def whole_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, sharded tensors put together; every process calls it."""
    return {
        name: tensor.full_tensor() if is_sharded(tensor) else tensor for name, tensor in network.state_dict().items()
    }


def like(tensor: Tensor, parameter: Any, scalars_too: bool = True) -> Tensor:
    """A tensor where `parameter` is, sharded as it is where it has its shape.

    Args:
        scalars_too: whether tensors without dimensions move to the device of `parameter` as well. Step counters do so
            for a fused optimizer, and stay on the CPU otherwise.
    """
    if is_sharded(tensor):
        return tensor
    if is_sharded(parameter) and tensor.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device) if tensor.ndim or scalars_too else tensor


@torch.no_grad()
def fill(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a network, sharded or not, the values of tensors, sharded or not."""
    own = network.state_dict()
    network.load_state_dict({name: like(tensor, own[name]) for name, tensor in tensors.items()})
