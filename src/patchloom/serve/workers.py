"""Threads for work that would block the event loop. Cancelled work leaves the queue, and shutdown does not wait."""

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
    """One call in the queue; `since` is when it was submitted."""

    work: Callable[[], Any]
    cost: float
    since: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)

    @property
    def urgent(self) -> bool:
        return self.cost == 0

    @property
    def turn(self) -> float:
        """The sort key: cheap calls first, but a call of cost c waits at most about 10 c seconds for later ones."""
        return self.since + 10 * self.cost


class Workers:
    """Runs calls in `count` threads, urgent ones first, then by cost; `reserved` threads run urgent ones only.

    A call whose future is cancelled leaves the queue at once. The threads are daemons, so that work that cannot be
    interrupted, such as a decoder in C, does not keep the process alive.
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
        """Queue a call. `cost` is an estimate in seconds; 0 means urgent.

        Returns:
            A future; cancelling it removes the call, unless it is running.
        """
        call = _Call(work, cost)
        call.future.add_done_callback(lambda future: self._forget(call) if future.cancelled() else None)
        with self._changed:
            if not self._closed:
                self._waiting.append(call)
                self._changed.notify_all()  # not notify: the thread that wakes up could be a reserved one
        if self._closed:
            call.future.cancel()
        return call.future

    def ahead(self, urgent: bool) -> tuple[int, int]:
        """The number of calls before one that is submitted now: urgent ones and others."""
        with self._changed:
            calls = [*self._running, *(call for call in self._waiting if call.urgent or not urgent)]
        return sum(call.urgent for call in calls), sum(not call.urgent for call in calls)

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return bool(self._running)

    def close(self, seconds: float) -> None:
        """Cancel waiting calls, and wait at most `seconds` for running ones."""
        with self._changed:
            self._closed = True
            # Cancelled below, outside the lock: each cancellation calls `_forget`, which takes it.
            cancelled = list(self._waiting)
            self._changed.notify_all()
        for call in cancelled:
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
        """The call that a free thread should run next."""
        # Costly calls may not take the reserved threads, so that a small image never waits for a large one to decode.
        busy = sum(not call.urgent for call in self._running) >= self._most_costly
        able = [call for call in self._waiting if call.urgent or not busy]
        return min(able, key=lambda call: (not call.urgent, call.turn), default=None)

    def _work(self) -> None:
        while call := self._next():
            if call.future.set_running_or_notify_cancel():
                self._run(call)
            else:
                self._end(call)
            del call  # otherwise its image would stay in memory until the next call

    def _run(self, call: _Call) -> None:
        try:
            result = call.work()
        except BaseException as error:  # passed on to the waiting request; the thread continues
            self._end(call)
            call.future.set_exception(error)
        else:
            # Before the result: whoever waits for it may look at `busy` at once.
            self._end(call)
            call.future.set_result(result)

    def _end(self, call: _Call) -> None:
        with self._changed:
            self._running.remove(call)
            self._changed.notify_all()
