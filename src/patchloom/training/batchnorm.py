"""BatchNorm over the batches of all processes (sync_batchnorm=true).

torch's SyncBatchNorm runs on GPUs only, and knows no channels-last tokens; this one runs wherever processes can sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchloom.layers.norms import BatchNorm


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes; each process's gradient is the sum of theirs."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        # Every process added its x to a total that all of them use, so x receives the gradients of all of them.
        return _Sum.forward(_, gradient)


class _Synced(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm whose statistics in training are those of the images of all processes together."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        channels = x.ndim - 1 if isinstance(self, BatchNorm) else 1
        others = [axis for axis in range(x.ndim) if axis != channels]
        shape = [-1 if axis == channels else 1 for axis in range(x.ndim)]
        values = x.float()
        # Two all-reduces, one after the other. E[x^2] - E[x]^2 would need only one, but cancels in single precision
        # where the mean is large; squared deviations from the common mean do not.
        count = torch.full((1,), float(x.numel() // x.shape[channels]), device=x.device)
        total = _Sum.apply(torch.cat([values.sum(others), count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        # The mean stays in the autograd graph: gradients flow through the statistics of all processes.
        deviation = values - mean.view(shape)
        variance = _Sum.apply(deviation.square().sum(others)) / count
        self._track(mean.detach(), variance.detach(), count)
        y = deviation * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:  # affine=False has neither
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """The running statistics, as BatchNorm keeps them: with the unbiased variance."""
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
        # momentum=None asks BatchNorm for the plain average over all batches so far.
        momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked or 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), momentum)


_CLASSES: dict[type, type] = {}


def synchronise(network: nn.Module) -> None:
    """Make every BatchNorm of a network use the statistics of all processes; parameters and names stay the same."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, _Synced):
            kind: Any = type(module)
            if kind not in _CLASSES:
                _CLASSES[kind] = type(f"Synced{kind.__name__}", (_Synced, kind), {})
            # Changing the class in place keeps parameters, buffers and tensor names: checkpoints and the optimizer
            # do not notice. The new class is a subclass of `kind`, so that isinstance checks still hold.
            module.__class__ = _CLASSES[kind]


def norm_statistics(module: nn.Module) -> list[Tensor]:
    """The running statistics of the normalisation layers, the only buffers that a forward pass of training changes.
    Counters of batches, which are integers, are the same in every process."""
    return [
        buffer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        for buffer in layer.buffers(recurse=False)
    ]
