"""Threads for what would hold up the event loop: nothing that was given up stays behind, and no end waits for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    cost: float
    since: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)

    @property
    def urgent(self) -> bool:
        return self.cost == 0

    @property
    def turn(self) -> float:
        """Cheaper calls go first, but none for ever: one that costs a second lets those of ten seconds pass."""
        return self.since + 10 * self.cost


class Workers:
    """Runs calls in `count` threads, urgent ones first, then by cost; `reserved` threads take urgent ones only.

    A call whose future is cancelled leaves the queue at once.
    The threads are daemons: what cannot be interrupted, a decoder in C, does not keep the process alive.
    """

    def __init__(self, count: int, name: str, reserved: int = 0) -> None:
        self._most_costly = count - reserved
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any], cost: float = 0.0) -> Future[Any]:
        """`cost` is about how many seconds it takes; 0 makes it urgent."""
        call = _Call(work, cost)
        call.future.add_done_callback(lambda future: self._forget(call) if future.cancelled() else None)
        with self._changed:
            if not self._closed:
                self._waiting.append(call)
                self._changed.notify_all()  # a thread that is woken may be one that may not take it
        if self._closed:
            call.future.cancel()
        return call.future

    def ahead(self, urgent: bool) -> tuple[int, int]:
        """How many calls would be done before one submitted now: urgent ones, and others."""
        with self._changed:
            calls = [*self._running, *(call for call in self._waiting if call.urgent or not urgent)]
        return sum(call.urgent for call in calls), sum(not call.urgent for call in calls)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def close(self, seconds: float) -> None:
        """Give up what waits, and wait so long for what runs."""
        with self._changed:
            self._closed = True
            given_up = list(self._waiting)
            self._changed.notify_all()
        for call in given_up:
            call.future.cancel()
        limit = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _forget(self, call: _Call) -> None:
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)

    def _next(self) -> _Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._choice() or self._closed)
            call = self._choice()
            if call:
                self._waiting.remove(call)
                self._running.append(call)
            return call

    def _choice(self) -> _Call | None:
        """What a free thread should do next."""
        busy = sum(not call.urgent for call in self._running) >= self._most_costly
        able = [call for call in self._waiting if call.urgent or not busy]
        return min(able, key=lambda call: (not call.urgent, call.turn), default=None)

    def _work(self) -> None:
        while call := self._next():
            if call.future.set_running_or_notify_cancel():
                self._run(call)
            else:
                self._end(call)
            del call  # or it would keep its image until the next one comes

    def _run(self, call: _Call) -> None:
        try:
            result = call.work()
        except BaseException as error:  # for whoever waits for it; the thread goes on
            self._end(call)
            call.future.set_exception(error)
        else:
            self._end(call)
            call.future.set_result(result)

    def _end(self, call: _Call) -> None:
        with self._changed:
            self._running.remove(call)
            self._changed.notify_all()
