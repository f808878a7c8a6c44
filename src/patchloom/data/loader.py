"""Batches of images. Which images a step sees is a function of the step, so a run can be cut anywhere and go on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from patchloom.data import jpeg, native
from patchloom.data.images import resize_and_crop
from patchloom.data.parts import MOST_WORKERS
from patchloom.data.randomness import seed_of, torch_generator
from patchloom.data.sources import Item, Source
from patchloom.data.transforms import Augment, Size
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing

Key = tuple[int, int, int]  # image, epoch, repeat
Batches = Generator[tuple[Tensor, Tensor], None, None]
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 32 << 20  # bytes


@dataclass(frozen=True)
class Order:
    """Which images are in which batch.

    With `repeats` r each image of the shuffled order comes r times in a row, differently augmented, and an epoch keeps
    its length: it sees about 1 / r of the images. Several processes take turns along a batch, so that the copies of an
    image meet in different processes, as published; in one process they meet in one batch. Any number of images works.
    """

    images: int
    batch: int
    repeats: int = 1
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; what is over is left to the next shuffling. Fewer images than a batch are one batch."""
        return max(1, self.images // self.batch)

    @property
    def images_per_step(self) -> int:
        return min(self.batch, self.images)

    def epoch(self, epoch: int) -> list[Key]:
        shuffled = torch.randperm(self.images, generator=torch_generator(self.seed, epoch, "order")).tolist()
        keys = [(image, epoch, repeat) for image in shuffled for repeat in range(self.repeats)]
        return keys[: self.images]


class Steps(Sampler[list[Key]]):
    """The batches of one process, from step `start` on, to `end`."""

    def __init__(self, order: Order, start: int, end: int, rank: int = 0, processes: int = 1) -> None:
        self.order, self.start, self.end = order, start, end
        self.rank, self.processes = rank, processes

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        per_epoch, size = self.order.steps_per_epoch, self.order.images_per_step
        keys: list[Key] = []
        for step in range(self.start, self.end):
            epoch, inside = divmod(step, per_epoch)
            if not keys or inside == 0:
                keys = self.order.epoch(epoch)
            yield keys[inside * size : (inside + 1) * size][self.rank :: self.processes]


class TrainImages(Dataset[tuple[np.ndarray, int]]):
    """Augmented images (height, width, 3) uint8 with their labels, by key."""

    def __init__(self, source: Source, items: Sequence[Item], augment: Augment, size: Size, seed: int) -> None:
        self.source, self.items, self.augment, self.size, self.seed = source, items, augment, size, seed

    def __getitem__(self, key: Key) -> tuple[np.ndarray, int]:
        image, epoch, repeat = key
        item = self.items[image]
        seed = seed_of(self.seed, epoch, image, repeat, "image")
        picture = self.source.picture(item, fast=self.augment.pixels == "fast")
        return self.augment(picture, self.size, seed), item.label


class TestImages(Dataset[tuple[np.ndarray, int]]):
    """Images as evaluation sees them, (height, width, 3) uint8, by their place in `items`."""

    __test__ = False  # no test of pytest's

    def __init__(self, source: Source, items: Sequence[Item], how: Preprocessing) -> None:
        self.source, self.items, self.how = source, items, how

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> tuple[np.ndarray, int]:
        item = self.items[place]
        return np.asarray(resize_and_crop(self.source.read(item), self.how)), item.label


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[Tensor, Tensor]:
    """(B, height, width, 3) uint8 and (B,) labels."""
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    return images, torch.tensor([label for _, label in samples])


def train_batches(images: TrainImages, steps: Steps, workers: int) -> Batches:
    return _batches(images, steps, workers)


def test_batches(
    source: Source, places: Sequence[int], items: Sequence[Item], how: Preprocessing, batch: int, workers: int
) -> Batches:
    """Batches of the images at `places`, in this order, each once."""
    batches = [list(places[i : i + batch]) for i in range(0, len(places), batch)]
    return _batches(TestImages(source, items, how), batches, workers)


test_batches.__test__ = False  # type: ignore[attr-defined]


class _Caught(Dataset[Any]):
    """Samples, or the error of one that cannot be read: raised in a worker it would arrive as a traceback in text."""

    def __init__(self, images: Dataset[Any]) -> None:
        self.images = images

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.images[key]
        except PatchloomError as error:
            return error


def _collate_caught(samples: list[Any]) -> Any:
    error = next((sample for sample in samples if isinstance(sample, PatchloomError)), None)
    return collate(samples) if error is None else error


def _batches(images: Dataset[Any], batches: Any, workers: int) -> Batches:
    """The batches of a loader. Its workers end with the iteration, with `close()`, or with this process."""
    if workers > MOST_WORKERS:
        raise PatchloomError(f"workers={workers}: at most {MOST_WORKERS} processes may read images.")
    options: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
    native.available(), jpeg.available()  # tried here once: forked workers know the answer
    loader = DataLoader(
        _Caught(images),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate_caught,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        generator=torch.Generator().manual_seed(0),  # nothing draws from it, and the global one stays untouched
        **options,
    )
    return _read(loader)


def _read(loader: DataLoader[Any]) -> Batches:
    try:
        iterator: Any = iter(loader)
    except OSError as error:
        raise PatchloomError(
            f"{loader.num_workers} processes that read images could not be started: {error}."
        ) from error
    workers = getattr(iterator, "_workers", [])
    if workers:
        # torch would raise the loss of a worker anywhere, in the middle of a step too; `next` notices it as well
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        end = Finalize(iterator, _end, (workers,), exitpriority=0)  # at exit, multiprocessing would wait for them
    try:
        for batch in iterator:
            if isinstance(batch, PatchloomError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        if all(worker.is_alive() for worker in workers):
            raise
        raise PatchloomError(
            "A worker process that reads images ended unexpectedly: it was killed, or memory or shared memory ran "
            f"out. Use fewer than {len(workers)} workers (0 starts none). To resume a run, set `workers: 0` in its "
            "recipe.yaml first; a smaller batch_size needs a new run."
        ) from error
    finally:
        if workers:
            iterator._shutdown = True  # torch's own end may wait for locks that a killed worker took along
            end()


def _end(workers: Sequence[Any]) -> None:
    """SIGKILL: workers ignore the signals that end others."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


def _begin_worker(parent: int, _: int) -> None:
    """Signals to the whole group are for the process that trains: it saves, then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(parent)
    torch.set_num_threads(1)
    _keep_memory()


def _end_with(parent: int) -> None:
    """A worker keeps open what its parent has open, the lock of the run folder too: it ends when the parent is killed.
    torch looks for the parent every five seconds, and never where it was gone before the worker first looked."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep_memory() -> None:
    """Pictures come and go by the hundred a second: glibc is told not to give their memory back each time."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT)
