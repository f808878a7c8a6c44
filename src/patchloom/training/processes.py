"""One process or several: rank, device, and what processes exchange."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.devices import Device, choose_device, make_current, process_backend, supports
from patchloom.errors import PatchloomError, StoppedError

T = TypeVar("T")
_LOST = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|Socket closed", re.IGNORECASE
)  # of gloo and TCPStore


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; alone, rank 0 of 1.

    Methods that communicate (`gather`, `any`, `total`, `average`, `wait`) must be called by every process, in the same
    order; with one process they return at once.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def gather(self, thing: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing)
        return things

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any process."""
        if self.count == 1:
            return flags
        # One all-reduce for all flags: it is called after every step. MAX of 0 and 1 is "any".
        raised = torch.tensor([float(flag) for flag in flags], device=self.device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return tuple(bool(value) for value in raised.tolist())

    def total(self, value: float) -> float:
        """The sum of a number over processes."""
        if self.count == 1:
            return value
        # float32 counts exactly up to 2^24 only; MPS has nothing better.
        dtype = torch.float64 if supports(self.device, torch.float64) else torch.float32
        summed = torch.tensor(value, dtype=dtype, device=self.device)
        dist.all_reduce(summed)
        return float(summed)

    @torch.no_grad()
    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows (n, ...) of all processes, those of the first one first; each may have another number of them."""
        if self.count == 1:
            return rows
        sizes = self.gather(len(rows))
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = padded.view(torch.uint8) if rows.dtype.itemsize == 2 else padded  # gloo sends no half precision
        parts = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(parts, sent)
        return torch.cat([part.view(rows.dtype)[:size] for part, size in zip(parts, sizes, strict=True)])

    @torch.no_grad()
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over processes, written over it."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest values over processes, written over the tensor."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Make each tensor the mean over processes, in place."""
        several = list(tensors) if self.count > 1 else []
        if several:
            # One all-reduce instead of one per tensor: latency dominates for these small vectors.
            flat = torch.cat([tensor.reshape(-1).float() for tensor in several])
            dist.all_reduce(flat)
            for tensor, mean in zip(several, (flat / self.count).split([t.numel() for t in several]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def together(self, batches: Iterator[T]) -> Iterator[T]:
        """Batches that every process reads for itself, equally many in each. If one cannot read its next one, all raise
        a `PatchloomError`: those that went on alone would wait for it in their next all-reduce."""
        end = object()
        while True:
            batch: Any = end
            problem: PatchloomError | None = None
            try:
                batch = next(batches, end)
            except PatchloomError as error:
                problem = error
            failed = self.any(problem is not None)[0]
            if problem is not None:
                raise problem
            if failed:
                raise PatchloomError("another process cannot read its batch")
            if batch is end:
                return
            yield batch

    @contextmanager
    def notice_loss(self, consequence: str) -> Iterator[None]:
        """Raise a `StoppedError` that ends with `consequence` where torch cannot reach another process any more.

        A full disk, or a lock that is taken, ends the main process only; kill -9 ends any. The others notice it in
        their next all-reduce, wherever that is."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _LOST.search(str(error)):
                raise
            raise StoppedError(f"Another process of this run ended; its own message says why. {consequence}") from error

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.count > 1:
            dist.barrier()


def join_processes(device: Device = "auto") -> Processes:
    """Join the processes that torchrun started, or be the only one; `device` is what `choose_device` takes."""
    # torchrun sets these; without it there is one process.
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = choose_device(device)
    # Before the process group: NCCL takes the current device of each process.
    make_current(chosen)
    if count > 1 and not dist.is_initialized():
        dist.init_process_group(process_backend(chosen))
    return Processes(rank, count, chosen)


def data_parallel(module: nn.Module) -> DistributedDataParallel:
    """The module with an all-reduce of its gradients. Buffers stay as they are: the loop averages statistics after
    every step, and memories may differ from process to process."""
    with warnings.catch_warnings():
        # Deprecated since torch 2.13, which has no other way yet to leave buffers out of the first synchronisation.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(module, broadcast_buffers=False)


def restarted(processes: Processes) -> bool:
    """Whether torchrun has started the same command again, after a process was lost; the same in all processes.

    torchrun counts the restarts of each machine apart, and only those after a failure there: a machine that was started
    again, or whose processes were stopped because another one failed, has a count of 0. So one count is enough."""
    return processes.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)[0]


def leave_processes() -> None:
    """Close the process group, if there is one; torch warns at exit otherwise."""
    if dist.is_available() and dist.is_initialized():
        # The first process holds the store of the others: one that leaves much later could crash in its threads.
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()
