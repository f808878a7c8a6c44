"""Batches read by worker processes: errors arrive as they are, lost workers are noticed, none is left behind."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from patchloom.data import jpeg, native
from patchloom.data.collating import collate as stack
from patchloom.data.parts import MOST_WORKERS
from patchloom.errors import PatchloomError, is_out_of_memory

Batches = Generator[Any, None, None]
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 32 << 20  # bytes
_ENDING = 2.0  # seconds that a killed process may take to end
_LESS = "To resume a run, set `workers: 0` in its recipe.yaml first; a smaller batch_size needs a new run."


def load_batches(
    dataset: Dataset[Any],
    batch_sampler: Iterable[list[Any]],
    workers: int,
    collate: Callable[..., Any] = stack,
    pin: bool = False,
) -> Batches:
    """The batches of a dataset: one `collate(samples)` for each list of keys that the sampler gives, in its order.

    Worker processes end with the iteration, with `close()`, or with this process. A `PatchloomError` of the dataset or
    of `collate` is raised here as it is, whatever the number of workers. `pin`: in pinned memory, see
    `patchloom.devices.pins_memory`.
    """
    if not 0 <= workers <= MOST_WORKERS:
        raise PatchloomError(f"workers={workers}: at most {MOST_WORKERS} processes may read images, and at least 0.")
    started: list[Any] = []
    options: dict[str, Any] = {"prefetch_factor": 4, "multiprocessing_context": _noting(started)} if workers else {}
    native.available(), jpeg.available()  # tried here once: forked workers inherit the result
    loader = DataLoader(
        _Caught(dataset),
        batch_sampler=batch_sampler,
        num_workers=workers,
        collate_fn=partial(_collate_caught, collate),
        pin_memory=pin,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        generator=torch.Generator().manual_seed(0),  # nothing draws from it, and the global one stays untouched
        **options,
    )
    return _read(loader, started)


def _noting(started: list[Any]) -> Any:
    """torch's context for processes, which notes those that it makes: without it those of a loader that fails while it
    begins could not be ended."""
    context: Any = copy.copy(torch.multiprocessing.get_context())
    make = context.Process

    def process(*args: Any, **options: Any) -> Any:
        started.append(make(*args, **options))
        return started[-1]

    context.Process = process
    return context


class _Caught(Dataset[Any]):
    """Samples, or the error of one that cannot be read: raised in a worker it would arrive as a traceback in text."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        return _caught(lambda: self.dataset[key])


def _collate_caught(collate: Callable[..., Any], samples: list[Any]) -> Any:
    error = next((sample for sample in samples if isinstance(sample, PatchloomError)), None)
    if error is not None:
        return error
    return _caught(lambda: collate(samples))


def _caught(read: Callable[[], Any]) -> Any:
    """What `read` gives, or its error; too little memory is one too, so that a run is saved and the message tells."""
    try:
        return read()
    except PatchloomError as error:
        return error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return PatchloomError(f"There is not enough memory to read images: {error}. {_LESS}")


def _read(loader: DataLoader[Any], workers: list[Any]) -> Batches:
    end = Finalize(loader, _end, (workers,), exitpriority=0)  # at exit, multiprocessing would wait for them
    try:
        iterator: Any = iter(loader)
        if workers:
            # torch would raise the loss of a worker anywhere, in the middle of a step too; `next` notices it as well
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
    except BaseException as error:
        end()
        if not isinstance(error, (OSError, RuntimeError)):  # the latter is how torch reports a worker's end
            raise
        raise PatchloomError(
            f"{loader.num_workers} processes that read images could not be started: {error}. {_LESS}"
        ) from error
    try:
        for batch in iterator:
            if isinstance(batch, PatchloomError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        # The connection to a killed worker may be reset before its process has ended.
        if not wait([worker.sentinel for worker in workers], timeout=_ENDING):
            raise
        raise PatchloomError(
            "A worker process that reads images ended unexpectedly: it was killed, or memory or shared memory ran "
            f"out. Use fewer than {len(workers)} workers (0 starts none). {_LESS}"
        ) from error
    finally:
        if done := getattr(iterator, "_pin_memory_thread_done_event", None):
            done.set()  # as torch's own end would
        if workers:
            iterator._shutdown = True  # torch's own end may wait for locks that a killed worker took along
        end()


def _end(workers: Sequence[Any]) -> None:
    """Kill the workers, with SIGKILL since they ignore SIGINT and SIGTERM, and wait for them."""
    begun = [worker for worker in workers if worker.pid is not None]
    for worker in begun:
        worker.kill()
    for worker in begun:
        worker.join()


def _begin_worker(parent: int, _: int) -> None:
    """Set up a worker. It ignores signals to the process group: the training process saves, then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(parent)
    # Called where a batch cannot be sent, as with a full /dev/shm; by default the batch is dropped, and waited for.
    Queue._on_queue_feeder_error = staticmethod(_give_up)  # type: ignore[attr-defined]
    # One thread each: several workers with several threads would take turns on the same cores.
    torch.set_num_threads(1)
    _keep_memory()


def _give_up(error: Exception, _: object) -> None:
    """End this worker, which the training process notices."""
    print(f"patchloom: A worker process cannot send the images that it read: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with(parent: int) -> None:
    """A worker keeps open what its parent has open, the lock of the run folder too: it ends when the parent is killed.
    torch looks for the parent every five seconds, and never where it was gone before the worker first looked."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl took effect; then the worker has another parent already.
    if os.getppid() != parent:
        os._exit(1)


def _keep_memory() -> None:
    """Hundreds of pictures are allocated and freed per second: glibc is told not to return their memory each time."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT)
