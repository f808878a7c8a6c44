"""Concurrent requests as one batch: a thread of its own takes what waits for a model and runs the network on it.

While it computes, the next images are decoded and gather; nothing waits for a full batch.
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
class Answer:
    """Probabilities (classes,) of one image, and how its time was spent."""

    chances: np.ndarray
    batch: int
    queued: float  # seconds
    computed: float


@dataclass(eq=False)
class _Job:
    model: HostedModel
    pixels: np.ndarray  # (height, width, 3) uint8
    future: Future[Answer]
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """`expect()` when a request begins, `submit()` when its image is decoded, or `forget()` if it never will be.

    A batch is begun as soon as the thread is free. It waits up to `max_wait` seconds only while images are expected,
    so that a lone request is answered at once.
    """

    def __init__(
        self, max_batch: int, max_wait: float, observe: Callable[[HostedModel, Answer], None] | None = None
    ) -> None:
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.observe = observe
        self._jobs: deque[_Job] = deque()
        self._expected = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        with self._changed:
            self._expected += 1

    def forget(self) -> None:
        with self._changed:
            self._expected -= 1
            self._changed.notify()

    def submit(self, model: HostedModel, pixels: np.ndarray) -> Future[Answer]:
        """An expected image, (height, width, 3) uint8 as the model's preprocessing cuts it."""
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
        return len(self._jobs)

    def close(self, seconds: float | None = None) -> None:
        """Finish what waits, then end the thread; go on without it after so many seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while jobs := self._next_batch():
            live = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if live:
                self._run(live)

    def _next_batch(self) -> list[_Job]:
        """Up to `max_batch` images of the model that has waited longest; nothing once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return []
            model = self._jobs[0].model
            self._changed.wait_for(lambda: self._is_full(model) or not self._expected, self.max_wait)
            taken: list[_Job] = []
            rest: deque[_Job] = deque()
            for job in self._jobs:
                (taken if job.model is model and len(taken) < self.max_batch else rest).append(job)
            self._jobs = rest
            return taken

    def _is_full(self, model: HostedModel) -> bool:
        return sum(job.model is model for job in self._jobs) >= self.max_batch

    def _run(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        try:
            rows = class_probabilities(jobs[0].model.answering, np.stack([job.pixels for job in jobs]))
            computed = time.perf_counter() - started
            answers = [
                Answer(row, len(jobs), started - job.since, computed) for job, row in zip(jobs, rows, strict=True)
            ]
        except Exception as error:  # one answer each, and the thread goes on
            for job in jobs:
                job.future.set_exception(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            self._note(job.model, answer)
            job.future.set_result(answer)

    def _note(self, model: HostedModel, answer: Answer) -> None:
        try:
            if self.observe:
                self.observe(model, answer)
        except Exception:  # an answer that was not counted is an answer still
            _log.exception("A prediction was not counted")
