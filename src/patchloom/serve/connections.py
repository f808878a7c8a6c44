"""Connections: idle ones end, and there are always fewer than files that the process may open."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from patchloom.errors import PatchloomError

ACCEPTED_AT_ONCE = 4
_SPARE_FILES = 32  # a reload reads files, and a socket is closed some turns of the event loop after others came
_FEWEST = 4
_BUSY = json.dumps({"error": "The service has too many connections. Try again in a moment."}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


def most_connections(wanted: int) -> int:
    """How many there may be beside the files that are open already."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    free = limit - len(os.listdir("/dev/fd")) - _SPARE_FILES
    if free < _FEWEST:
        raise PatchloomError(
            f"This process may open {limit} files, too few to serve. Allow {limit - free + _FEWEST} or more: ulimit -n."
        )
    return min(wanted, free)


class Connections:
    """All connections of a server. One too many takes the place of the one that has been idle longest."""

    def __init__(self, most: int, idle_timeout: float) -> None:
        self.most = most
        self.idle_timeout = idle_timeout
        self.open: set[Connection] = set()
        self.idle: dict[Connection, asyncio.TimerHandle] = {}  # in the order in which they fell idle

    @property
    def protocol(self) -> Any:
        return partial(Connection, self)

    def make_room(self) -> bool:
        """Whether there is a place for one more."""
        if len(self.open) >= self.most and self.idle:
            next(iter(self.idle)).end()
        return len(self.open) < self.most


class Connection(H11Protocol):
    """Idle is a connection without a complete request head, since it was made or since its last answer."""

    def __init__(self, all_of_them: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all_of_them
        self._unsent = 0  # bytes of an answer, when this was last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.make_room():
            transport.write(_REFUSAL)
            transport.close()
            return
        self._all.open.add(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """The client does not read its answer: from now on it has to, or the connection ends."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def end(self) -> None:
        """At once, whatever is unsent."""
        self._forget()
        self.transport.abort()

    def _update(self) -> None:
        if self not in self._all.open:
            return
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_waiting()
        elif self not in self._all.idle:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._unsent = self.transport.get_write_buffer_size()
        self._all.idle[self] = self.loop.call_later(self._all.idle_timeout, self._time_is_over)

    def _time_is_over(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._unsent:
            self._wait()  # a slow client, but it reads
        else:
            self.end()

    def _stop_waiting(self) -> None:
        if timer := self._all.idle.pop(self, None):
            timer.cancel()

    def _forget(self) -> None:
        self._stop_waiting()
        self._all.open.discard(self)


class AcceptErrors:
    """Exception handler of an event loop that tells of failed accepts at most once in a minute: asyncio repeats them
    many times a second."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds
            print(f"patchloom: no connection can be accepted: {context['exception']}", file=sys.stderr, flush=True)
