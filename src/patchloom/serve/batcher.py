"""Batching of concurrent requests: one thread takes the images that wait for a model and runs the network on them.

While it computes, the next images are decoded and queue up; a batch does not wait until it is full.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from patchloom.inference.predict import class_probabilities
from patchloom.serve.hosting import HostedModel

_log = logging.getLogger("patchloom.serve")


@dataclass(eq=False)
class BatchResult:
    """Probabilities (classes,) of one image, the size of its batch, and the time it took."""

    probabilities: np.ndarray
    batch: int
    queued: float  # seconds in the queue
    computed: float  # seconds of the network, for the whole batch


@dataclass(eq=False)
class _Job:
    model: HostedModel
    pixels: np.ndarray  # (height, width, 3) uint8
    future: Future[BatchResult]
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """Call `expect()` when a request starts, then `submit()` when its image is decoded, or `forget()` if that fails.

    A batch starts as soon as the thread is free. It waits, for at most `max_wait` seconds, only while more images are
    expected, so that a single request is computed at once.

    Args:
        max_batch: images per forward pass.
        max_wait: seconds.
        observe: called with every result, for metrics; its errors are logged and ignored.
    """

    def __init__(
        self, max_batch: int, max_wait: float, observe: Callable[[HostedModel, BatchResult], None] | None = None
    ) -> None:
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.observe = observe
        self._jobs: deque[_Job] = deque()
        self._expected = 0
        self._closed = False
        self._changed = threading.Condition()
        # One thread: the network itself uses all cores, and two batches at once would slow each other down.
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Announce an image that is being decoded."""
        with self._changed:
            self._expected += 1

    def forget(self) -> None:
        """Withdraw an announced image."""
        with self._changed:
            self._expected -= 1
            self._changed.notify()

    def submit(self, model: HostedModel, pixels: np.ndarray) -> Future[BatchResult]:
        """Queue an announced image, (height, width, 3) uint8, resized and cropped for the model."""
        job = _Job(model, pixels, Future())
        with self._changed:
            self._expected -= 1
            if self._closed:
                job.future.cancel()
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    @property
    def waiting(self) -> int:
        """The number of images in the queue."""
        return len(self._jobs)

    def close(self, seconds: float | None = None) -> None:
        """Finish the queue, then end the thread; return after `seconds` at the latest."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while jobs := self._next_batch():
            # Marks the futures as running; those that were cancelled meanwhile (the client left) are dropped.
            live = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if live:
                self._run(live)

    def _next_batch(self) -> list[_Job]:
        """Up to `max_batch` images of the model that has waited longest; empty once closed and finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return []
            model = self._jobs[0].model
            # Three ways to start: a full batch, no more images expected, or the time is over.
            self._changed.wait_for(lambda: self._is_full(model) or not self._expected, self.max_wait)
            taken: list[_Job] = []
            rest: deque[_Job] = deque()
            for job in self._jobs:
                # Only images of one model fit into a batch; the others keep their order.
                (taken if job.model is model and len(taken) < self.max_batch else rest).append(job)
            self._jobs = rest
            return taken

    def _is_full(self, model: HostedModel) -> bool:
        return sum(job.model is model for job in self._jobs) >= self.max_batch

    def _run(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        try:
            rows = class_probabilities(jobs[0].model.predictor, np.stack([job.pixels for job in jobs]))
            computed = time.perf_counter() - started
            results = [
                BatchResult(row, len(jobs), started - job.since, computed) for job, row in zip(jobs, rows, strict=True)
            ]
        except Exception as error:  # every request of the batch gets the error, and the thread continues
            for job in jobs:
                job.future.set_exception(error)
            return
        for job, result in zip(jobs, results, strict=True):
            self._count(job.model, result)
            job.future.set_result(result)

    def _count(self, model: HostedModel, result: BatchResult) -> None:
        try:
            if self.observe:
                self.observe(model, result)
        except Exception:  # a failure to count must not fail the request
            _log.exception("A prediction was not counted")
